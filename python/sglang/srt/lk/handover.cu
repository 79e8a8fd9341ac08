// The GPU's end of the hand-over: a layer's rows go to pinned host memory, its routed sums come back.
//
// `publish` writes the rows and raises a number that the host polls; `collect` waits for the same number and copies
// the answer. Both are ordinary kernels on the layer's stream, so a CUDA graph replays them, and what the stream (or
// another one) does between them overlaps with the CPU. With `control` null they only copy, for host functions.
// Compiled when the server starts (NVRTC, see driver.py); includes nothing. sgl-kernel-ext/moe/handover.h is the
// other end and has the same Control.

typedef unsigned long long u64;
typedef unsigned int u32;

struct Control {
  u64 request; u32 layer, rows; u64 pad0[6];                // written here
  u64 done, abort; u64 pad1[6];                             // written by the host
  u64 expired, wait_ns, round_ns; u64 pad2[5]; u64 spare[8];  // written here
};

// In device memory, zero at the start. One request at a time, so plain accesses will do except for `arrived`.
struct State { u64 request, published_ns, wait_ns, round_ns; u32 arrived, aborted; };

// Rows as the model has them. Ids are int32 or int64 (`wide`); a row whose ids are all negative is padding.
struct Rows {
  char* data; u64 stride;            // bytes between rows
  const char* ids; u64 ids_stride;   // bytes
  const char* weights; u64 weights_stride;
  int rows, row_bytes, top_k, wide, words;  // words: rows may be copied 16 bytes at a time
};

static __device__ u64 now_ns() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }

static __device__ int id_of(const Rows& r, int row, int k) {
  const char* ids = r.ids + row * r.ids_stride;
  return r.wide ? (int)((const long long*)ids)[k] : ((const int*)ids)[k];
}

// Orders what this thread has seen written before against what it writes after, for the host too.
static __device__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

static __device__ uint4 load_host(const char* from, int word) {  // past every cache: the host has just written it
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"((const uint4*)from + word));
  return v;
}

extern "C" __global__ void __launch_bounds__(512) publish(Rows r, char* x, int* ids, float* weights, Control* control, State* state, int layer) {
  const int words = r.words ? r.row_bytes / 16 : 0;
  const int a = threadIdx.x, b = threadIdx.x + blockDim.x;
  const u64 request = control && threadIdx.x == 0 ? state->request + 1 : 0;
  for (int row = blockIdx.x; row < r.rows; row += gridDim.x) {
    const uint4* from = (const uint4*)(r.data + row * r.stride);
    uint4* to = (uint4*)(x + (u64)row * r.row_bytes);
    uint4 first, second;  // on their way while the ids are read
    if (a < words) first = from[a];
    if (b < words) second = from[b];
    int routed = 0;
    for (int k = threadIdx.x; k < r.top_k; k += blockDim.x) {
      const int id = id_of(r, row, k);
      ids[row * r.top_k + k] = id;
      weights[row * r.top_k + k] = ((const float*)(r.weights + row * r.weights_stride))[k];
      routed |= id >= 0;
    }
    if (!__syncthreads_or(routed)) continue;
    if (a < words) to[a] = first;
    if (b < words) to[b] = second;
    for (int i = b + blockDim.x; i < words; i += blockDim.x) to[i] = from[i];
    if (!r.words)
      for (int i = threadIdx.x; i < r.row_bytes / 2; i += blockDim.x) ((unsigned short*)to)[i] = ((const unsigned short*)from)[i];
  }
  if (!control) return;
  __syncthreads();
  if (threadIdx.x) return;
  *(volatile u32*)&control->layer = layer;  // every block writes the same
  *(volatile u32*)&control->rows = r.rows;
  fence();
  if (gridDim.x > 1) {
    if (atomicAdd(&state->arrived, 1) != gridDim.x - 1) return;
    state->arrived = 0;
    fence();
  }
  *(volatile u64*)&control->request = request;
  state->request = request;
  state->published_ns = now_ns();
}

// Thread 0 of a block: whether the answer is there. After the limit, or once the host says so, nobody waits any more.
static __device__ bool answered(Control* control, State* state, u64 limit_ns, int layer, u64 start) {
  volatile u32* aborted = &state->aborted;
  if (*aborted) return false;
  const u64 request = *(volatile u64*)&state->request;
  for (u32 n = 0;; ++n) {
    u64 done, abort;
    asm volatile("ld.volatile.global.v2.u64 {%0,%1}, [%2];" : "=l"(done), "=l"(abort) : "l"(&control->done));
    if (abort) { *aborted = 1; return false; }
    if (done == request) break;
    if ((n & 15) == 15 && now_ns() - start > limit_ns) {
      *aborted = 1;
      *(volatile u64*)&control->expired = layer + 1;
      fence();
      return false;
    }
    if (gridDim.x > 4 || n > 64) __nanosleep(n > 4096 ? 2000 : 200);
  }
  fence();
  return true;
}

extern "C" __global__ void __launch_bounds__(512) collect(Rows r, const char* out, Control* control, State* state, u64 limit_ns, int layer) {
  __shared__ int good;
  u64 start = 0, end = 0;
  if (threadIdx.x == 0) {
    start = now_ns();
    good = control ? answered(control, state, limit_ns, layer, start) : 1;
    end = now_ns();
  }
  const int words = r.words ? r.row_bytes / 16 : 0;
  const int a = threadIdx.x, b = threadIdx.x + blockDim.x;
  for (int row = blockIdx.x; row < r.rows; row += gridDim.x) {
    int routed = 0;
    for (int k = threadIdx.x; k < r.top_k; k += blockDim.x) routed |= id_of(r, row, k) >= 0;
    routed = __syncthreads_or(routed);  // also: the answer is there
    const char* from = out + (u64)row * r.row_bytes;
    uint4* to = (uint4*)(r.data + row * r.stride);
    if (!good || !routed) {
      // Without an answer a row is NaN in every type, so that nothing can take it for a result.
      const u32 filler = good ? 0u : 0xffffffffu;
      for (int i = a; i < words; i += blockDim.x) to[i] = make_uint4(filler, filler, filler, filler);
      if (!r.words)
        for (int i = a; i < r.row_bytes / 2; i += blockDim.x) ((unsigned short*)to)[i] = (unsigned short)filler;
      continue;
    }
    uint4 first, second;  // both on the link at once
    if (a < words) first = load_host(from, a);
    if (b < words) second = load_host(from, b);
    if (a < words) to[a] = first;
    if (b < words) to[b] = second;
    for (int i = b + blockDim.x; i < words; i += blockDim.x) to[i] = load_host(from, i);
    if (!r.words)
      for (int i = a; i < r.row_bytes / 2; i += blockDim.x) ((unsigned short*)to)[i] = ((const volatile unsigned short*)from)[i];
  }
  if (control && blockIdx.x == 0 && threadIdx.x == 0 && good) {
    *(volatile u64*)&control->wait_ns = state->wait_ns += end - start;
    *(volatile u64*)&control->round_ns = state->round_ns += end - state->published_ns;
  }
}
