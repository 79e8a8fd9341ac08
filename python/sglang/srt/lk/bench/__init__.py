"""Kernel benchmarks that compare themselves with the machine they run on.

An expert call is measured between two runs of a plain memory reader, and beside the peak of the same dot
product that it uses, because shared machines change speed by a factor of two within minutes. What counts is the
share of the machine that a kernel reaches; milliseconds of two runs are not comparable.

* ``cases``: what is measured: shapes, formats, rows, and which experts the tokens visit.
* ``plan``: options and settings in, one plan or every problem out.
* ``weights``: random experts of every format, many times larger than the caches.
* ``kernels``: the measuring itself.
* ``report``: table and JSON.
* ``roofline``: the picture.
* ``compare``: two JSON files against each other.
* ``handover``: the way from a GPU to the CPU experts and back, inside CUDA graphs.
* ``serving``: a server of random weights and a given shape (``models/``), timed from outside.

No torch in here, except where a GPU or a server is measured: numpy buffers and pointers, so that the command answers at once.
"""
