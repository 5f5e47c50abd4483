"""Every kernel on a GPU: checked against its reference, then timed beside torch's own.

A case's floor is the fewest bytes it moves (each input read once, each output written once) over
the copy bandwidth, or the products it adds over the rate of a large matrix product, whichever takes
longer; both rates are measured in the same run. Its fraction is the floor over the time. Times are
medians over replays of a CUDA graph that calls the operation on many sets of inputs in turn, of
several times the L2 cache together, so every call finds it cold; outputs are not written twice.

No number is printed of an operation that failed a check: errors to a computation in float32 are at
most twice those of the plain torch reference in the same precision, and where bits are promised
they are those of the reference on the CPU. Each operation has processes of its own, so that one
that breaks the device leaves the others; the exit status is then 1. Checks go side by side, as most
of their time is the compiler's; times are taken one by one.

    python tests/bench/kernels.py [--only decode] [--quick] [--out tests/bench/results/kernels.json]

It needs torch, Triton and numpy, and no installed package.
"""

if __name__ == "__main__":  # scripts beside this import transformers, which tries to import kernels
    from kernel_runs import main

    main(__doc__)
