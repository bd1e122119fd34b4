"""Raise flag words, await flag words, or meet: both, word by word.

    signal:  words at signal[p] + signal_offset become `epoch` (MONOTONE: unless higher)
    wait:    until the word at wait[p] + wait_offset is at `epoch`, for each program p

grid      one program per word; sequentially too: program p of a rank waits for its peers alone
writes    the signalled words; at most once *failed = ticket (nobody came) or -ticket (other stamp)
bound by  latency: a release store to a peer, acquire polls of own memory (about 1 us each)
accepts   int64 addresses of int32 words on 64-byte lines; epochs wrap unless MONOTONE
source    oracle: `flags.PlainFlags`
"""

import triton
import triton.language as tl

_ARGUMENTS = {
    "signal_ptr": "*i64",
    "signal_offset": "i64",
    "wait_ptr": "*i64",
    "wait_offset": "i64",
    "epoch": "i32",
    "stamp": "i32",
    "poison_address": "i64",
    "failed_address": "i64",
    "ticket": "i32",
    "most_polls": "i32",
}
_SIGNAL = {"SIGNAL": True, "WAIT": False, "MONOTONE": True}
_WAIT = {"SIGNAL": False, "WAIT": True, "MONOTONE": True}
_BARRIER = {"SIGNAL": True, "WAIT": True, "MONOTONE": False}
SIGNATURES = {"exchange_flags_kernel": [(_ARGUMENTS, use) for use in (_SIGNAL, _WAIT, _BARRIER)]}


@triton.jit(
    do_not_specialize=["signal_offset", "wait_offset", "epoch", "stamp", "ticket", "most_polls"]
)
def exchange_flags_kernel(
    signal_ptr,
    signal_offset,
    wait_ptr,
    wait_offset,
    epoch,
    stamp,
    poison_address,
    failed_address,
    ticket,
    most_polls,
    SIGNAL: tl.constexpr,
    WAIT: tl.constexpr,
    MONOTONE: tl.constexpr,
):
    # The stamps of two epochs lie behind the word; a peer is at most one epoch ahead.
    place = 1 + (epoch & 1)
    if SIGNAL:
        target = (tl.load(signal_ptr + tl.program_id(0)) + signal_offset).to(
            tl.pointer_type(tl.int32)
        )
        if MONOTONE:
            tl.atomic_max(target, epoch, sem="release", scope="sys")
        else:
            tl.store(target + place, stamp)
            tl.atomic_xchg(target, epoch, sem="release", scope="sys")
    if WAIT:
        word = (tl.load(wait_ptr + tl.program_id(0)) + wait_offset).to(tl.pointer_type(tl.int32))
        # These two live in host memory: plain loads, and few of them.
        poison_ptr = poison_address.to(tl.pointer_type(tl.int32))
        failed_ptr = failed_address.to(tl.pointer_type(tl.int32))
        stop = tl.load(poison_ptr, volatile=True) | tl.load(failed_ptr, volatile=True)
        value = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        # Half the range behind or more: not there yet. In 64 bits, where nothing overflows.
        behind = ((value.to(tl.int64) - epoch) & 0xFFFFFFFF) >= 0x80000000
        polls = 0
        while behind & (stop == 0) & (polls < most_polls):
            value = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            behind = ((value.to(tl.int64) - epoch) & 0xFFFFFFFF) >= 0x80000000
            polls += 1
            if polls % 64 == 0:
                stop = tl.load(poison_ptr, volatile=True) | tl.load(failed_ptr, volatile=True)
        if behind:
            if stop == 0:
                tl.store(failed_ptr, ticket)
        elif SIGNAL:  # noqa: SIM102 - SIGNAL is known to the compiler, the rest is not
            if tl.load(word + place, volatile=True) != stamp:
                tl.store(failed_ptr, -ticket)
