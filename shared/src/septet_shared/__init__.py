"""What seven systems for training large models have in common: ranks, memory, time.

    ranks           process groups, collectives that name who is missing, local ranks
    symmetric_heap  one allocation that every rank of a machine can read and write
    link            emulated network links, so that overlap is measurable on one machine
    memory_pool     arenas, rings of reusable buffers, peak counters, spill files
    profiling       spans, paired comparisons with intervals, hardware profiles
    streams         a simulator of compute, communication and copy streams
    native          C++ for the CPU, built once and cached
    experiment      a paper's figures as modules: rows, claims, plots, commands
    testing         what the tests of all systems assert with

Import the module you need; this package itself imports nothing.
"""

__version__ = "0.1.0"
