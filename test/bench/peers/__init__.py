"""Complete expert calls of this project and of its peers side by side in one run.

    python test/bench/peers run --json out.json     # installs the peers into a cache of its own on the first run
    python test/bench/peers table out.json          # ours against the fastest peer, as a table for a page
    python test/bench/peers pack FOLDER             # what a machine without a network needs

Peers are kt-kernel and llama.cpp as their packages have them. Each engine runs in a process of its own, of which only the
one that is measured is awake. Nothing here is part of the installed package, and nothing of the peers is in the repository.

- ``cases``    what is measured: shapes, tokens, formats and who computes them; which cases are not worth their time
- ``formats``  random matrices in every format with their exact values, and the float64 truth
- ``lk``, ``kt``, ``llama``   one engine each: weights in, callables out; a new peer is one more of these
- ``worker``   the process around one engine: builds, checks against the truth, times
- ``measure``  the order of everything, and the look at the machine around each case
- ``report``   the result as JSON and as a table
- ``install``  the peers from their packages, and the folder to carry
- ``serving_kt``, ``kt_server``   a program of its own: decode and prefill of a KTransformers server and of ours
- ``park.c``   lets kt-kernel's caller sleep where it would take a worker's core
"""
