"""Every byte of every block lies in exactly the granules of its group, and the sums agree with counting them."""

from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.geometry import KvGeometry
from engine.memory.arena import GRANULE

geometries = st.builds(
    KvGeometry,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 6),
    head_dim=st.sampled_from([16, 48, 64, 80, 128]),
    dtype=st.sampled_from(["f32", "f16", "int8"]),
    granule=st.sampled_from([1 << 12, 1 << 14, 1 << 16]),
    block_tokens=st.sampled_from([4, 16, 64]),
    multiple=st.sampled_from([1, 1, 3]),
)


@given(geometry=geometries, n_blocks=st.integers(1, 100))
def test_a_group_is_the_fewest_blocks_that_are_whole_granules(geometry, n_blocks):
    whole = [n for n in range(1, geometry.group_blocks + 1) if n * geometry.run_bytes % geometry.granule == 0]
    assert whole[0] * geometry.multiple == geometry.group_blocks


@given(geometry=geometries, n_blocks=st.integers(1, 100))
def test_no_two_groups_share_a_granule_of_values_and_all_bytes_are_covered(geometry, n_blocks):
    groups = range(geometry.groups(n_blocks))
    owner = {}
    for group in groups:
        spans = geometry.value_spans(group, n_blocks)
        assert len(spans) == geometry.runs
        for first, count in spans:
            for granule in range(first, first + count):
                assert owner.setdefault(granule, group) == group
                assert granule < geometry.scales_start(n_blocks)
    stride = geometry.groups(n_blocks) * geometry.group_blocks * geometry.run_bytes
    for run in range(geometry.runs):
        for block in range(n_blocks):
            start = run * stride + block * geometry.run_bytes
            touched = range(start // geometry.granule, -(-(start + geometry.run_bytes) // geometry.granule))
            assert {owner[granule] for granule in touched} == {block // geometry.group_blocks}


@given(geometry=geometries, n_blocks=st.integers(1, 100), data=st.data())
def test_sums_agree_with_counted_granules(geometry, n_blocks, data):
    groups = range(geometry.groups(n_blocks))
    assert geometry.bytes_of(groups, n_blocks) == geometry.pool_bytes(n_blocks)
    some = data.draw(st.sets(st.sampled_from(groups)))
    counted = set()
    for group in some:
        for first, count in geometry.value_spans(group, n_blocks):
            counted.update(range(first, first + count))
        counted.update(geometry.scale_granules(group, n_blocks))
    assert geometry.bytes_of(some, n_blocks) == len(counted) * geometry.granule
    assert max(counted, default=0) < geometry.address_granules(n_blocks)


@given(geometry=geometries, size=st.integers(0, 1 << 24))
def test_as_many_blocks_as_go_in(geometry, size):
    blocks = geometry.blocks_in(size)
    assert geometry.pool_bytes(blocks) <= size or blocks == 0
    assert geometry.pool_bytes(blocks + 1) > size


def test_figures_of_a_known_model():
    """Qwen3-8B: 36 layers, 8 KV heads of 128."""
    f16 = KvGeometry(36, 8, 128, "f16")
    assert (f16.run_bytes, f16.group_blocks, f16.group_granules) == (128 << 10, 16, 1)
    assert f16.block_bytes == 9 << 20
    assert f16.pool_bytes(16) == 72 * GRANULE
    assert f16.pool_bytes(1) == 72 * GRANULE
    int8 = KvGeometry(36, 8, 128, "int8")
    assert int8.group_blocks == 32
    assert int8.block_bytes == 72 * (64 << 10) + 72 * 1024
    assert int8.pool_bytes(32) == (72 + 2) * GRANULE


def test_a_large_pool_has_few_large_groups():
    small = KvGeometry(36, 8, 128, "f16")
    assert small.coarse(1000).group_blocks == 16
    large = small.coarse(14_000)
    assert (large.group_blocks, large.groups(14_000)) == (112, 125)
    assert large.pool_bytes(14_000) == small.pool_bytes(14_000)
    assert large.coarse(100) == small
