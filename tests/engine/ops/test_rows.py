from engine.ops.rows import Rows, Span


def test_rows_of_spans():
    rows = Rows.of([Span([5, 6, 7], 62, [4, 9]), Span([8], 0, [2])])
    assert len(rows) == 4
    assert rows.tokens.tolist() == [5, 6, 7, 8]
    assert rows.positions.tolist() == [62, 63, 64, 0]
    assert rows.sequences.tolist() == [0, 0, 0, 1]
    assert rows.spans.tolist() == [[0, 3, 62], [3, 1, 0]]
    assert rows.tables.tolist() == [[4, 9], [2, 0]]
