"""Hybrid MoE: each expert layer gets a role, and the `cpu` role computes it with our own kernels.

SGLang calls in at two places, and only when ``LK_MOE_HYBRID_ENABLED`` is set: ``boot.start`` checks the environment
before anything heavy is imported, and ``method.make_for_layer`` wraps a layer's quantization method before its weights
are created. With the switch off nothing here is imported and SGLang is stock. Importing this package imports nothing.

- ``values``   how the text of a variable becomes a value: kinds, ranges, layer lists
- ``config``   the table of variables, read once into one frozen object
- ``boot``     the start: every problem in one message, warnings said once; with ``cli`` the only reader of variables
- ``cpus``     which CPUs and how much memory this process may really use, and why
- ``roles``    which role each MoE layer plays; pure bookkeeping
- ``compat``   what does not go together with hybrid layers, said before loading
- ``formats``  which checkpoint formats are taken over, and how their tensors are read
- ``loading``  experts from the checkpoint into packed panels on the host
- ``store``    the packed experts of one layer
- ``kernels``  tensors in, native engine calls out
- ``handover`` rows from the GPU to the CPU experts and back, inside CUDA graphs; ``driver`` builds and launches its kernels
- ``padding``  how many rows of a captured batch are real
- ``telemetry`` what the hand-over says of itself: a log line every so many steps, and metrics beside upstream's
- ``method``   the wrapper around SGLang's quantization method: wiring only
- ``patches``  the few places where SGLang is changed while it runs; ``cpu_models`` has those for models on a CPU,
  ``cpu_formats`` those for quantized experts there, ``cpu_linear`` what becomes of quantized layers beside them
- ``cli``      the command ``sglang-lk``: ``doctor`` (with ``checkpoint``, ``machine``, ``install_check``, ``doctor_text``)
  and ``bench``; ``term`` draws their tables

The switch, the variables and their defaults: ``docs/reference/environment.md``, generated from ``config``.
"""
