"""The heap against a plain Python model, driven by random sequences of operations."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from septet_shared.symmetric_heap import SymmetricHeap

DTYPES = {torch.uint8: 1, torch.int16: 2, torch.int64: 8}


class Model(RuleBasedStateMachine):
    """Each tensor is a list of integers per rank; flags are integers; memory is a counter."""

    tensors = Bundle("tensors")

    @initialize(size=st.integers(1, 3), nbytes=st.integers(64, 4096))
    def start(self, size, nbytes):
        self.size = size
        self.heap = SymmetricHeap.local(size, nbytes, slots=32)
        self.views = [self.heap.on(r) for r in range(size)]
        self.reserved = nbytes
        self.values = {}  # key -> [rank][element]
        self.made = {}  # key -> [rank] tensor
        self.arenas = []  # stack of (arenas by rank, keys allocated inside)
        self.flags = [[0, 0] for _ in range(size)]
        self.channels = [v.channel("c", 2) for v in self.views]

    @rule(target=tensors, count=st.integers(0, 40), dtype=st.sampled_from(list(DTYPES)),
          align=st.sampled_from([1, 64, 256]), inside=st.booleans())  # fmt: skip
    def allocate(self, count, dtype, align, inside):
        makers, keys = self.arenas[-1] if self.arenas and inside else (self.views, [])
        made = []
        for maker in makers:
            try:
                made.append(maker.empty(count, dtype, align))
            except MemoryError:
                made.append(None)
        if made[0] is None:
            assert made == [None] * self.size  # all refuse alike
            return multiple()
        for t in made:
            assert t.data_ptr() % align == 0 or count == 0
            t.zero_()
        key = len(self.made)
        self.made[key] = made
        self.values[key] = [[0] * count for _ in range(self.size)]
        keys.append(key)
        return key

    @rule(key=tensors, data=st.data())
    def write_through_any_rank(self, key, data):
        if key not in self.values or not self.values[key][0]:
            return
        writer = data.draw(st.integers(0, self.size - 1))
        owner = data.draw(st.integers(0, self.size - 1))
        first = data.draw(st.integers(0, len(self.values[key][0]) - 1))
        step = data.draw(st.integers(1, 3))
        value = data.draw(st.integers(0, 127))
        view = self.made[key][writer][first::step]
        self.views[writer].peer(view, owner).fill_(value)
        for i in range(first, len(self.values[key][owner]), step):
            self.values[key][owner][i] = value

    @rule(nbytes=st.integers(1, 1500))
    def enter_arena(self, nbytes):
        arenas = [v.arena(nbytes) for v in self.views]
        try:
            for a in arenas:
                a.__enter__()
        except MemoryError:
            for v in self.views[1:]:  # the others make the same call, and fail alike
                try:
                    v.arena(nbytes).__enter__()
                    raise AssertionError("rank 0 had no room for what another rank could take")
                except MemoryError:
                    pass
            return
        self.arenas.append((arenas, []))

    @precondition(lambda self: self.arenas)
    @rule(which=st.integers(0, 5))
    def leave_arena(self, which):
        arenas, keys = self.arenas.pop(which % len(self.arenas))
        for a in arenas:
            a.__exit__(None, None, None)
        for key in keys:
            del self.values[key]

    @rule(nbytes=st.integers(1, 2000))
    def grow(self, nbytes):
        for v in self.views:
            v.grow(nbytes)
        self.reserved += nbytes

    @rule(data=st.data(), i=st.integers(0, 1), epoch=st.integers(1, 50))
    def signal(self, data, i, epoch):
        sender = data.draw(st.integers(0, self.size - 1))
        receiver = data.draw(st.integers(0, self.size - 1))
        self.channels[sender].signal(receiver, i, epoch)
        self.flags[receiver][i] = max(self.flags[receiver][i], epoch)

    @rule(key=consumes(tensors))
    def forget(self, key):
        """The bundle lets go of a tensor; its memory stays taken."""

    @invariant()
    def every_rank_sees_what_the_model_holds(self):
        for key, ranks in self.values.items():
            for owner, expected in enumerate(ranks):
                for reader in range(self.size):
                    seen = self.views[reader].peer(self.made[key][reader], owner)
                    assert seen.tolist() == expected

    @invariant()
    def pointers_are_addresses_of_the_owners_tensors(self):
        for key in self.values:
            if self.values[key][0]:
                expected = [t.data_ptr() for t in self.made[key]]
                assert self.views[-1].pointers(self.made[key][-1]).tolist() == expected

    @invariant()
    def words_are_at_the_highest_epoch_signalled(self):
        for rank, words in enumerate(self.flags):
            for i, epoch in enumerate(words):
                word = self.channels[rank]._words[rank] + 64 * i
                address = int(self.heap.flag_pointers()[rank])
                assert word == address + 64 * (self.channels[rank].first_word + i)
                if epoch:
                    self.channels[rank].wait(i, epoch, timeout_s=0)

    @invariant()
    def counters_agree_with_the_model(self):
        s = self.heap.statistics()
        assert s.bytes_reserved == self.reserved
        assert s.bytes_used <= s.peak_bytes <= s.bytes_reserved
        assert all(v.statistics() == s for v in self.views)

    def teardown(self):
        if hasattr(self, "heap"):
            self.heap.close()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
