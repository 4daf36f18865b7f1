/* CUDA 13 that computes nothing, for what the host does on a GPU: the runtime, the driver and cuBLAS, as far as a training
   step of torch calls them, as an H100 of which no kernel runs. Loaded before all else, and found as libcuda.so.1.

   Memory is the host's, zeros at first; copies are made, kernels only listed, in $IMITATION. Streams, events and captures
   follow the rules of capture: what they forbid fails as it would. Inductor and Triton compile for sm_90 on it, so

     cc -w -shared -fPIC -o /tmp/cuda/libcuda.so.1 tests/run/imitation.c -ldl -lpthread
     LD_PRELOAD=/tmp/cuda/libcuda.so.1 LD_LIBRARY_PATH=/tmp/cuda IMITATION=/tmp/cuda/list \
         python -m bench step --modes graph --recipe imagenet-vit-s --batch-size 512

   shows whether the step would start on a GPU, and what it would launch. cuDNN, NCCL and DALI's decoder do not run on it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct { int capturing; unsigned long long id; } Stream;
typedef struct { int captured; } Event;
typedef struct { unsigned x, y, z; } Dim;
typedef struct { char *at; size_t size; int pinned; } Block;

enum { NO_MEMORY = 2, UNSUPPORTED = 900, ISOLATION = 905, IMPLICIT = 906, CAPTURED_EVENT = 907, RELAXED = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block blocks[4096];
static Stream legacy, *joined[64]; /* those that wait for one that is captured are captured with it, until that ends */
static int joins;
static unsigned long long captures;
static FILE *list;
static __thread int capturing_here, mode, last; /* of this thread: captures begun, its mode, its last error */

void say(const char *what) {
    pthread_mutex_lock(&lock);
    if (!list) list = fopen(getenv("IMITATION"), "w");
    fprintf(list, "%s\n", what);
    fflush(list);
    pthread_mutex_unlock(&lock);
}

static int fail(int error) { return last = error; }
static Stream *of(Stream *stream) { return (size_t)stream > 2 ? stream : &legacy; }
static int forbidden(void) { return capturing_here && mode != RELAXED; }

static Block *find(const char *at) {
    for (Block *b = blocks; b < blocks + 4096; b++)
        if (b->at && at >= b->at && at < b->at + b->size) return b;
    return NULL;
}

static int allot(void **out, size_t size, int pinned) {
    *out = NULL;
    if (forbidden()) return fail(UNSUPPORTED);
    say(pinned ? "allocates pinned" : "allocates");
    pthread_mutex_lock(&lock);
    Block *b = blocks;
    while (b < blocks + 4096 && b->at) b++;
    if (b < blocks + 4096) {
        *b = (Block){mmap(NULL, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), size + 1, pinned};
        if (b->at == MAP_FAILED) b->at = NULL;
        *out = b->at;
    }
    pthread_mutex_unlock(&lock);
    return *out ? 0 : fail(NO_MEMORY);
}

static int release(void *at) {
    if (at && forbidden()) return fail(UNSUPPORTED);
    pthread_mutex_lock(&lock);
    Block *b = at ? find(at) : NULL;
    if (b) munmap(b->at, b->size), b->at = NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* The card */
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *n) { *n = 0; return 0; }
int cudaSetDevice(int n) { return n ? fail(101) : 0; }
int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = 80ul << 30; return 0; }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {{1, 1024}, {8, 49152}, {10, 32}, {16, 132}, {38, 50 << 20}, {39, 2048}, {41, 1},
                                   {75, 9}, {81, 233472}, {82, 65536}, {95, 1}, {97, 232448}, {115, 1}};
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return 0;
}

int cudaGetDeviceProperties(char *p, int device) { /* places of cudaDeviceProp, CUDA 13 */
    struct {
        char name[256], uuid[16], luid[8];
        unsigned mask;
        size_t memory, shared;
        int registers, warp;
        size_t pitch;
        int threads, block[3], grid[3];
        size_t constant;
        int major, minor;
        size_t texture[2];
        int processors, other[41];
        size_t surface;
        int more[9], l2, kept_l2, resident, most[3];
        size_t shared_of_processor;
        int registers_of_processor, last[9];
        size_t shared_at_most;
    } card = {.name = "An imitated H100", .memory = 80ul << 30, .shared = 49152, .registers = 65536, .warp = 32,
              .threads = 1024, .block = {1024, 1024, 64}, .grid = {0x7fffffff, 65535, 65535}, .major = 9,
              .texture = {512, 32}, .processors = 132, .l2 = 50 << 20,
              .resident = 2048, .shared_of_processor = 233472, .registers_of_processor = 65536, .shared_at_most = 232448};
    memset(p, 0, 1008);
    memcpy(p, &card, sizeof card);
    return 0;
}

/* Memory */
int cudaMalloc(void **at, size_t size) { return allot(at, size, 0); }
int cudaHostAlloc(void **at, size_t size, unsigned flags) { return allot(at, size, 1); }
int cudaFree(void *at) { return release(at); }
int cudaFreeHost(void *at) { return release(at); }

int cudaPointerGetAttributes(struct { int type, device; void *on_device, *on_host; long reserved[8]; } *a, void *at) {
    Block *b = find(at);
    memset(a, 0, sizeof *a);
    a->type = b ? 2 - b->pinned : 0;
    a->on_device = a->on_host = at;
    return 0;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Stream *stream) {
    Block *b = find(to), *a = find(from);
    say(a && b ? "copies" : "copies pageable");
    memcpy(to, from, size);
    return 0;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    say("waits");
    if (forbidden()) return fail(IMPLICIT);
    memcpy(to, from, size);
    return 0;
}

int cudaMemsetAsync(void *at, int value, size_t size, Stream *stream) { say("memset"); memset(at, value, size); return 0; }

/* Streams, events, captures */
int cudaStreamCreateWithPriority(Stream **s, unsigned flags, int priority) { *s = calloc(1, sizeof **s); return 0; }
int cudaStreamCreate(Stream **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
int cudaStreamQuery(Stream *s) { return of(s)->capturing ? fail(UNSUPPORTED) : 0; }
int cudaStreamSynchronize(Stream *s) { say("waits"); return of(s)->capturing ? fail(UNSUPPORTED) : 0; }
int cudaDeviceSynchronize(void) { say("waits"); return capturing_here ? fail(UNSUPPORTED) : 0; }
int cudaStreamIsCapturing(Stream *s, int *status) { *status = of(s)->capturing; return 0; }

int cudaStreamWaitEvent(Stream *s, Event *e, unsigned flags) {
    if (of(s)->capturing && !e->captured) return fail(ISOLATION);
    if (e->captured && !of(s)->capturing) joined[joins++] = of(s), of(s)->capturing = 1;
    return 0;
}

int cudaStreamGetCaptureInfo(Stream *s, int *status, unsigned long long *id, void **graph, void **nodes, void **edges, size_t *n) {
    if (status) *status = of(s)->capturing;
    if (id) *id = of(s)->id;
    if (graph) *graph = of(s)->capturing ? of(s) : NULL;
    if (n) *n = 0;
    return 0;
}

int cudaThreadExchangeStreamCaptureMode(int *m) { int before = mode; mode = *m; *m = before; return 0; }

int cudaStreamBeginCapture(Stream *s, int m) {
    if (of(s) == &legacy) return fail(UNSUPPORTED);
    s->capturing = 1, s->id = ++captures, capturing_here += m != RELAXED;
    say("begins");
    return 0;
}

int cudaStreamEndCapture(Stream *s, void **graph) {
    s->capturing = 0, capturing_here = 0, *graph = s;
    while (joins) joined[--joins]->capturing = 0;
    say("ends");
    return 0;
}

int cudaGraphInstantiateWithFlags(void **run, void *graph, unsigned long long flags) { *run = graph; return 0; }
int cudaGraphGetNodes(void *graph, void **nodes, size_t *n) { *n = 1; return 0; }
int cudaGraphLaunch(void *run, Stream *s) { say("graph"); return 0; }
int cudaEventCreateWithFlags(Event **e, unsigned flags) { *e = calloc(1, sizeof **e); return 0; }
int cudaEventCreate(Event **e) { return cudaEventCreateWithFlags(e, 0); }
int cudaEventRecordWithFlags(Event *e, Stream *s, unsigned flags) { e->captured = of(s)->capturing; return 0; }
int cudaEventRecord(Event *e, Stream *s) { return cudaEventRecordWithFlags(e, s, 0); }
int cudaEventQuery(Event *e) { return e->captured ? fail(CAPTURED_EVENT) : forbidden() ? fail(UNSUPPORTED) : 0; }
int cudaEventSynchronize(Event *e) { say("waits"); return e->captured ? fail(CAPTURED_EVENT) : 0; }
int cudaEventElapsedTime(float *ms, Event *a, Event *b) { *ms = 1; return 0; }
int cudaGetLastError(void) { int error = last; last = 0; return error; }
int cudaPeekAtLastError(void) { return last; }

const char *cudaGetErrorString(int error) {
    static __thread char text[40];
    sprintf(text, "error %d of CUDA", error);
    return text;
}

const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }

/* Kernels: torch's own by the runtime, Triton's by the driver, whose functions are their names here */
static __thread struct { Dim grid, block; size_t shared; void *stream; } launch;
unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void *stream) {
    launch.grid = grid, launch.block = block, launch.shared = shared, launch.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared, void **stream) {
    *grid = launch.grid, *block = launch.block, *shared = launch.shared, *stream = launch.stream;
    return 0;
}
void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
char __cudaInitModule(void **handle) { return 1; }
int __cudaGetKernel(void **kernel, void *function) { *kernel = function; return 0; }
int __cudaLaunchKernel() { say("kernel"); return 0; }
int cudaLaunchKernel() { say("kernel"); return 0; }
int cudaLaunchKernelExC() { say("kernel"); return 0; }
int cudaFuncGetAttributes(int *attributes, void *function) {
    memset(attributes, 0, 64);
    attributes[6] = 1024; /* threads a block */
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { *n = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { *n = 2; return 0; }
int cuModuleGetFunction(char **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuLaunchKernelEx(void *how, char *function) { say(function); return 0; }
int cuLaunchKernel(char *function) { say(function); return 0; }
int cuModuleLoad(void **module, const char *file) { *module = &legacy; return 0; }
int cuModuleLoadData(void **module, void *image) { *module = &legacy; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuDeviceGet(int *device, int number) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
int cuCtxGetCurrent(void **context) { *context = &legacy; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 1 << 20; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &legacy; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error of the driver"; return 0; }
int cuPointerGetAttribute(void **value, int attribute, void *at) { *value = at; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = !*function;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **function) { *function = dlsym(RTLD_DEFAULT, name); return 0; }

/* cuBLAS */
int cublasCreate_v2(void **handle) { *handle = calloc(1, 64); return 0; }
int cublasGetMathMode(void *handle, int *m) { return *m = 0; }
int cublasGetPointerMode_v2(void *handle, int *m) { return *m = 0; }
int cublasLtMatrixLayoutCreate(void **made) { *made = calloc(1, 64); return 0; }
int cublasLtMatmulDescCreate(void **made) { *made = calloc(1, 64); return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 64); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *p, int n, char *found, int *count) {
    memset(found, 0, 96);
    *count = 1;
    return 0;
}
#define PRODUCT(name) int name() { say("product"); return 0; }
PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasLtMatmul)

/* What gives nothing back */
#define NOTHING(name) int name() { return 0; }
NOTHING(cudaStreamDestroy) NOTHING(cudaEventDestroy) NOTHING(cudaGraphDestroy) NOTHING(cudaGraphExecDestroy)
NOTHING(cudaFuncSetAttribute) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuInit)
NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuModuleUnload) NOTHING(cublasDestroy_v2)
NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasLtMatrixLayoutDestroy) NOTHING(cublasLtMatrixLayoutSetAttribute) NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cuGraphGetNodes)
