/* What stands in for libcuda.so.1 on a host that has no NVIDIA driver: it satisfies the loader, no more.
 *
 * sgl_kernel's common_ops links against libcuda.so.1 and takes one symbol from it, so that the CPU engine
 * cannot import it on such a host. `sglang/__init__.py` loads this library there (edit
 * "serve-without-driver") and only then. It answers "no device" and must never look like a driver: no
 * cuDriverGetVersion and no cuGetProcAddress, without which the CUDA runtime reports "no driver", as before.
 * Symbols of a new sgl_kernel: `nm -D --undefined-only …/common_ops*.so | grep ' cu[A-Z]'`.
 */

enum { CUDA_ERROR_NO_DEVICE = 100 };

#define EXPORT __attribute__((visibility("default")))

/* Triton asks cuInit whether a driver is active. */
EXPORT int cuInit(unsigned int flags) {
    (void)flags;
    return CUDA_ERROR_NO_DEVICE;
}

EXPORT int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
    (void)data, (void)attribute, (void)pointer;
    return CUDA_ERROR_NO_DEVICE;
}
