"""Small models on small cards, and flags applied as a user would."""

from dataclasses import replace

from hypothesis import strategies as st

from engine.plan import Ask, Card, Costs, Demand
from engine.plan.costs import MIB

COSTS = Costs(
    granule=1 << 16,
    driver_reserve=2 * MIB,
    context=3 * MIB,
    modules=MIB,
    cublas_workspace=MIB,
    graph_node=1000,
    tensor_alignment=1,
)


def applied(ask: Ask, change: str) -> Ask:
    """`ask` with the flags of a change, read from its text."""
    words = change.split()
    for flag, figure in zip(words[::2], words[1::2], strict=True):
        figures = tuple(int(part) for part in figure.split(",")) if figure[0].isdigit() else ()
        changes = {
            "--max-context": lambda figures=figures: {"max_context": figures[0]},
            "--kv-dtype": lambda figure=figure: {"kv_dtype": figure},
            "--layer-split": lambda figures=figures: {"layer_split": figures},
            "--kv-pool-mib": lambda figures=figures: {"kv_pool_mib": figures[0]},
            "--vram-reserve-mib": lambda figures=figures: {"reserve_mib": figures},
            "--vram-reserve-later-mib": lambda figures=figures: {"reserve_later_mib": figures[0]},
        }[flag]()
        ask = replace(ask, **changes)
    return ask


@st.composite
def models(draw) -> Demand:
    n_layers = draw(st.integers(2, 6))
    tied = draw(st.booleans())
    embedding = draw(st.integers(0, 6)) * MIB
    return Demand(
        layer_weights=tuple(draw(st.lists(st.integers(1, 8 * MIB), min_size=n_layers, max_size=n_layers))),
        embedding=embedding,
        head=1000 if tied else 1000 + embedding,
        head_shared=embedding if tied else 0,
        layer_shadow=tuple(draw(st.lists(st.integers(0, 4 * MIB), min_size=n_layers, max_size=n_layers))),
        kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([16, 48, 64])),
        trained_context=draw(st.sampled_from([100, 640, 5000, 40_000])),
        row_scratch=draw(st.integers(100, 3000)),
        logit_scratch=draw(st.integers(0, MIB)),
    )


@st.composite
def asks(draw, n_layers: int, splits: bool, pools: bool | None, later: bool | None, context: bool | None) -> Ask:
    n_cards = draw(st.integers(2 if later else 1, min(3, n_layers)))
    contexts = {None: [None, 1, 64, 100], True: [1, 64, 100], False: [None]}[context]
    cards = tuple(
        Card(device, total * MIB, 2 * MIB, (total - 2 - other) * MIB)
        for device, (total, other) in enumerate(
            draw(st.lists(st.tuples(st.integers(12, 60), st.integers(0, 4)), min_size=n_cards, max_size=n_cards))
        )
    )
    split = None
    if splits and draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, n_layers - 1), min_size=n_cards - 1, max_size=n_cards - 1)))
        split = tuple(end - start for start, end in zip([0, *cuts], [*cuts, n_layers], strict=True))
    each = n_cards if draw(st.booleans()) else 1
    return Ask(
        cards=cards,
        kv_dtype=draw(st.sampled_from(["f32", "f16", "int8"])),
        max_context=draw(st.sampled_from(contexts)),
        max_batch=draw(st.sampled_from([1, 8])),
        prefill_rows=draw(st.sampled_from([64, 512])),
        kv_pool_mib=draw(st.integers(1, 40)) if pools or (pools is None and draw(st.integers(0, 3)) == 0) else None,
        layer_split=split,
        reserve_mib=tuple(draw(st.lists(st.integers(0, 11), min_size=each, max_size=each))),
        reserve_later_mib=draw(st.integers(0, 11))
        if later or (later is None and n_cards > 1 and draw(st.booleans()))
        else None,
        shadow=draw(st.booleans()),
    )


@st.composite
def problems(draw, *, splits=True, pools=None, later=None, context=None) -> tuple[Demand, Ask]:
    """A model and what is asked for it. `pools`, `later` and `context`: given always, never, sometimes (None)."""
    needs = draw(models())
    ask = draw(asks(needs.n_layers, splits, pools, later, context))
    longer = draw(st.sampled_from([1, 7, 40, 400]))
    context = None if ask.max_context is None else min(needs.trained_context, ask.max_context * longer)
    return needs, replace(ask, max_context=context)
