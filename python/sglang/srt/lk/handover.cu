// The GPU's end of the hand-over: a layer's rows go to pinned host memory, its routed sums come back.
//
// `exchange` writes the rows, raises a number that the host polls, waits for the same number and copies the answer. It
// is an ordinary kernel on the layer's stream, so a CUDA graph replays it, and what another stream does meanwhile
// overlaps with the CPU. `publish` and `collect` are its copying alone, for host functions between them. Compiled when
// the server starts (NVRTC, see driver.py); includes nothing. sgl-kernel-ext/moe/handover.h is the other end and has
// the same Control.

typedef unsigned long long u64;
typedef unsigned int u32;

constexpr int kMostRows = 4096;  // MOST_ROWS of handover.py

struct Control {
  u64 request; u32 layer, rows; u64 pad0[6];                // written here
  u64 done, abort; u64 pad1[6];                             // written by the host
  u64 expired, wait_ns; u64 pad2[6]; u64 spare[8];          // written here
};

// In device memory, zero at the start. Requests follow each other, and each has the number after `finished`, which it
// raises at its end whatever that was: nothing is ever reset but `arrived`, which wraps.
struct State { u64 finished, waited_ns; u32 arrived, aborted; };

// Rows as the model has them.
struct Rows {
  char* data; u64 stride;  // bytes between rows
  int row_bytes, words;    // words: rows may be copied 16 bytes at a time
};

// Ids are int32 or int64 (`wide`). A row whose ids are all negative is padding, and where `real` is not null so are the
// rows from `*real` on of the batch whose row `first` is row 0 here.
struct Routes {
  const char* ids; u64 ids_stride;  // bytes
  const char* weights; u64 weights_stride;
  const int* real;
  int rows, top_k, wide, first;
};

// Pinned memory: Buffers of handover.py.
struct Host { Control* control; char* x; int* ids; float* weights; const char* out; };

static __device__ u64 now_ns() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }

// What this thread has written or seen written comes before what it writes after: for this GPU, and for the host too.
static __device__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
static __device__ void fence_host() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// What is read after these is at least as new as what they have read: of the host, of this GPU.
static __device__ u64 acquire_host(const u64* at) { u64 v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory"); return v; }
static __device__ u64 acquire(const u64* at) { u64 v; asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory"); return v; }
static __device__ void release(u64* at, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(at), "l"(v) : "memory"); }

static __device__ uint4 load_host(const char* from, int word) {  // past every cache: the host has just written it
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"((const uint4*)from + word));
  return v;
}

static __device__ int id_of(const Routes& routes, int row, int k) {
  const char* ids = routes.ids + row * routes.ids_stride;
  const int id = routes.wide ? (int)((const long long*)ids)[k] : ((const int*)ids)[k];
  return routes.real && routes.first + row >= *routes.real ? -1 : id;
}

// The whole block: one row with its routes to the host, only the routes if it is padding. Whether it is routed.
static __device__ bool send(const Rows& x, const Routes& routes, const Host& host, int row) {
  const int words = x.words ? x.row_bytes / 16 : 0;
  const int a = threadIdx.x, b = threadIdx.x + blockDim.x;
  const uint4* from = (const uint4*)(x.data + row * x.stride);
  uint4* to = (uint4*)(host.x + (u64)row * x.row_bytes);
  uint4 first, second;  // on their way while the ids and `*real` are read
  if (a < words) first = from[a];
  if (b < words) second = from[b];
  int routed = 0;
  for (int k = threadIdx.x; k < routes.top_k; k += blockDim.x) {
    const float weight = ((const float*)(routes.weights + row * routes.weights_stride))[k];
    const int id = id_of(routes, row, k);
    host.ids[row * routes.top_k + k] = id;  // after the reads: for all the compiler knows it changes what they read
    host.weights[row * routes.top_k + k] = weight;
    routed |= id >= 0;
  }
  if (!__syncthreads_or(routed)) return false;
  if (a < words) to[a] = first;
  if (b < words) to[b] = second;
  for (int i = b + blockDim.x; i < words; i += blockDim.x) to[i] = from[i];
  if (!x.words)
    for (int i = threadIdx.x; i < x.row_bytes / 2; i += blockDim.x) ((unsigned short*)to)[i] = ((const unsigned short*)from)[i];
  return true;
}

// The whole block: one row of the answer.
static __device__ void receive(const Rows& y, const Host& host, int row) {
  const int words = y.words ? y.row_bytes / 16 : 0;
  const int a = threadIdx.x, b = threadIdx.x + blockDim.x;
  const char* from = host.out + (u64)row * y.row_bytes;
  uint4* to = (uint4*)(y.data + row * y.stride);
  uint4 first, second;  // both on the link at once
  if (a < words) first = load_host(from, a);
  if (b < words) second = load_host(from, b);
  if (a < words) to[a] = first;
  if (b < words) to[b] = second;
  for (int i = b + blockDim.x; i < words; i += blockDim.x) to[i] = load_host(from, i);
  if (!y.words)
    for (int i = a; i < y.row_bytes / 2; i += blockDim.x) ((unsigned short*)to)[i] = ((const volatile unsigned short*)from)[i];
}

// The whole block: a row that nobody computed.
static __device__ void fill(const Rows& y, int row, u32 filler) {
  const int words = y.words ? y.row_bytes / 16 : 0;
  char* to = y.data + row * y.stride;
  for (int i = threadIdx.x; i < words; i += blockDim.x) ((uint4*)to)[i] = make_uint4(filler, filler, filler, filler);
  if (!y.words)
    for (int i = threadIdx.x; i < y.row_bytes / 2; i += blockDim.x) ((unsigned short*)to)[i] = (unsigned short)filler;
}

extern "C" __global__ void __launch_bounds__(512) publish(Rows x, Routes routes, Host host) {
  for (int row = blockIdx.x; row < routes.rows; row += gridDim.x) send(x, routes, host, row);
}

extern "C" __global__ void __launch_bounds__(512) collect(Rows y, Routes routes, Host host) {
  for (int row = blockIdx.x; row < routes.rows; row += gridDim.x) {
    int routed = 0;
    for (int k = threadIdx.x; k < routes.top_k; k += blockDim.x) routed |= id_of(routes, row, k) >= 0;
    if (__syncthreads_or(routed)) receive(y, host, row);
    else fill(y, row, 0);
  }
}

// One look after the other at first; each is a round trip already.
static __device__ void rest(u32 looks) { if (looks > 64) __nanosleep(looks > 4096 ? 2000 : 200); }

// After the limit nobody waits any more, now or later, and the host hears which layer it was.
static __device__ bool expired(Control* control, State* state, u64 start, u64 limit_ns, int layer) {
  if (now_ns() - start <= limit_ns) return false;
  *(volatile u32*)&state->aborted = 1;
  *(volatile u64*)&control->expired = layer + 1;
  return true;
}

// One thread of each block, when its block's rows are written: whether the answer is there. The block that comes last
// announces the request and looks for the answer, alone on the link; the others wait for what it says in device memory.
// They need it to run, hence no more blocks than fit the GPU at once. `waited_ns` is set where the answer was seen.
static __device__ bool answered(const Host& host, State* state, u64 request, bool aborted, int rows, int layer, u64 limit_ns, u64* waited_ns) {
  Control* control = host.control;
  if (gridDim.x > 1) {
    fence();
    if (atomicInc(&state->arrived, gridDim.x - 1) != gridDim.x - 1) {
      const u64 start = now_ns();
      for (u32 n = 0; acquire(&state->finished) != request; ++n) {
        if (n % 64 == 63 && expired(control, state, start, limit_ns, layer)) return false;
        rest(n);
      }
      return !*(volatile u32*)&state->aborted;
    }
  }
  *(volatile u32*)&control->layer = layer;
  *(volatile u32*)&control->rows = rows;
  fence_host();  // the rows of every block that arrived, too
  *(volatile u64*)&control->request = request;
  const u64 start = now_ns();
  bool good = false;
  for (u32 n = 0; !aborted && !good; ++n) {
    if (n % 16 == 0) {
      aborted = *(volatile u64*)&control->abort;
      if (aborted) *(volatile u32*)&state->aborted = 1;
      else aborted = expired(control, state, start, limit_ns, layer);
      if (aborted) break;
    }
    good = acquire_host(&control->done) == request;
    if (!good) rest(n);
  }
  if (gridDim.x > 1) release(&state->finished, request);
  else state->finished = request;  // nobody waits for it
  if (good) *waited_ns = now_ns() - start;
  return good;
}

// One block per multiprocessor is enough, and its registers then need not be spilled.
extern "C" __global__ void __launch_bounds__(512, 1) exchange(Rows x, Rows y, Routes routes, Host host, State* state, u64 limit_ns, int layer) {
  __shared__ unsigned char routed[kMostRows];  // of this block's rows, in turn
  __shared__ bool good;
  u64 finished = 0, waited_before = 0, waited = 0;
  bool aborted = false;
  const bool speaker = threadIdx.x == blockDim.x - 1;  // sends no route and, if the row is short, no piece of it
  if (speaker) {  // before this block arrives, so before this request can finish
    finished = *(volatile u64*)&state->finished;
    waited_before = *(volatile u64*)&state->waited_ns;
    aborted = *(volatile u32*)&state->aborted;
  }
  for (int row = blockIdx.x, turn = 0; row < routes.rows; row += gridDim.x, ++turn) {
    const bool sent = send(x, routes, host, row);
    if (threadIdx.x == 0) routed[turn] = sent;
  }
  __syncthreads();
  if (speaker) good = answered(host, state, finished + 1, aborted, routes.rows, layer, limit_ns, &waited);
  __syncthreads();
  for (int row = blockIdx.x, turn = 0; row < routes.rows; row += gridDim.x, ++turn) {
    if (good && routed[turn]) receive(y, host, row);
    else fill(y, row, good ? 0u : 0xffffffffu);  // without an answer NaN in every type, so that nothing can take it for a result
  }
  if (waited) {
    waited += waited_before;
    *(volatile u64*)&state->waited_ns = waited;
    *(volatile u64*)&host.control->wait_ns = waited;
  }
}
