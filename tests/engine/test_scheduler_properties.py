"""Random lives of sequences through the whole scheduler: the books stay exact, every sequence ends once, and what it
says depends on nothing but its own text."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.messages import Sampling, Submit
from tests.engine.engine_in_process import Engine
from tests.engine.kv_cache.fixed_slot import FixedSlot, RecurrentPipeline
from tests.engine.scripted import BAD_ROW, BAD_TOKEN, expected_tokens

MAX_CONTEXT = 40
BLOCK_TOKENS = 4

# Few texts, so that sequences share prefixes, and lengths around the multiples of a block and of a chunk.
prompts = st.builds(
    lambda family, length, tail: [(7 * family + i) % 40 for i in range(length)] + tail,
    st.integers(0, 2),
    st.sampled_from([0, 1, 3, 4, 5, 8, 12, 13, 16, 24, 33]),
    st.lists(st.integers(0, 39), max_size=3),
)


class Lives(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.engine = None
        self.submits: dict[int, Submit] = {}
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.cancelled: set[int] = set()

    @precondition(lambda self: self.engine is None)
    @rule(
        n_blocks=st.integers(9, 24),
        max_batch=st.integers(1, 5),
        chunk=st.sampled_from([2, 4, 7]),
        fixed=st.booleans(),
        eager=st.booleans(),
        mixed=st.booleans(),
    )
    def start(self, n_blocks, max_batch, chunk, fixed, eager, mixed):
        pipeline = RecurrentPipeline(BLOCK_TOKENS, eager) if mixed else None
        self.engine = Engine(
            n_blocks,
            BLOCK_TOKENS,
            max_batch,
            MAX_CONTEXT,
            eager,
            pipeline,
            prefill_chunk=chunk,
            prefill_chunk_idle=3 * chunk,
            prefill_chunk_fixed=fixed,
            other_kinds=(FixedSlot(pipeline, every=chunk, n_snapshots=6),) if mixed else (),
        )

    @precondition(lambda self: self.engine is not None)
    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        stop_ids=st.sampled_from([(), (1, 2, 3), tuple(range(0, 48, 4))]),
        seed=st.integers(0, 1),
        resumed=st.integers(0, 6),
        cache_prompt=st.sampled_from([True, True, True, False]),
        scope=st.sampled_from(["", "", "other"]),
        fault=st.sampled_from([None] * 12 + [BAD_TOKEN, BAD_ROW, -1]),
        copies=st.integers(1, 3),
    )
    def submit(self, prompt, max_tokens, stop_ids, seed, resumed, cache_prompt, scope, fault, copies):
        prompt = prompt if fault is None else [*prompt, fault]
        for choice in range(copies):
            first = Submit(
                sequence=len(self.submits),
                prompt_ids=prompt,
                generated_ids=[],
                sampling=Sampling(seed=seed, choice=choice),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                cache_prompt=cache_prompt,
                cache_scope=scope,
            )
            if resumed and fault is None and 0 < len(prompt) < MAX_CONTEXT:
                # What another engine had sent before it died.
                sent = expected_tokens(first, MAX_CONTEXT)[0][:-1][:resumed]
                first = Submit(**{**{f: getattr(first, f) for f in first.__struct_fields__}, "generated_ids": sent})
            self.submits[first.sequence] = first
            if fault is None and 0 < len(prompt) < MAX_CONTEXT:
                tokens, reason = expected_tokens(first, MAX_CONTEXT)
                self.expected[first.sequence] = tokens[len(first.generated_ids) :], reason
            self.engine.submit(first)

    @precondition(lambda self: self.submits)
    @rule(data=st.data(), others=st.booleans())
    def cancel(self, data, others):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.submits)), min_size=1, max_size=3))
        self.cancelled.update(chosen)
        self.engine.cancel(*chosen, *([10**6] if others else []))

    @precondition(lambda self: self.submits and self.engine.busy)
    @rule(times=st.integers(1, 12))
    def turn(self, times):
        for _ in range(times):
            if self.engine.busy:
                self.engine.turn()

    @invariant()
    def output_is_a_prefix_of_the_undisturbed_one(self):
        for sequence, found in self.engine.tokens.items() if self.engine else ():
            expected, reason = self.expected[sequence]
            assert found == expected[: len(found)]
            ends = self.engine.ends[sequence]
            assert ends in ([], [reason], ["bad_row"])
            assert (ends == [reason]) == (found == expected)

    def teardown(self):
        if self.engine is None:
            return
        self.engine.run()
        assert self.engine.pool.used == 0
        assert self.engine.scheduler.holding() == []
        assert sorted(self.engine.released) == sorted(set(self.engine.released))
        for sequence, submit in self.submits.items():
            ends = self.engine.ends[sequence]
            assert len(ends) <= 1
            if not ends:
                assert sequence in self.cancelled
                assert sequence in self.engine.released
            elif ends == ["bad_request"]:
                prompt = submit.prompt_ids
                assert not prompt or {BAD_TOKEN, -1} & set(prompt) or len(prompt) >= MAX_CONTEXT
            elif ends == ["does_not_fit"]:
                needed = min(len(submit.prompt_ids) + submit.max_tokens, MAX_CONTEXT) - 1
                assert needed > self.engine.pool.n_blocks * BLOCK_TOKENS
            else:
                assert sequence in self.engine.released


Lives.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=25,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLives = Lives.TestCase
