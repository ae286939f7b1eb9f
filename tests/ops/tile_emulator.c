// Runs AMX tile instructions on x86-64 processors that have AVX-512 but no AMX, so that tests reach the code that uses
// them. Compile with -std=c11 -O3 -shared -fPIC; no -m flag is needed.
//
// Loaded before the code under test (LD_PRELOAD or dlopen), it takes SIGILL over. The handler decodes the instruction
// that faulted, performs it on tiles that belong to the thread and moves RIP behind it; vectors, flags and MXCSR come
// back from the signal frame as they were. Where CPUID or the request for permission (arch_prctl) is asked, the answer
// stays "no tiles".
//
// Known: LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED, TDPBF16PS, TDPFP16PS; no
// address size or segment prefix. Anything else, and everything the instruction set reference answers with #UD or #GP,
// goes to the handler that was installed before; without one the process dies of SIGILL after a line on stderr. A bad
// address is an ordinary SIGSEGV.
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

enum { kTiles = 8, kRows = 16, kRowBytes = 64, kSlots = 512 };

enum Kind { kLoadConfig, kStoreConfig, kRelease, kZero, kLoad, kLoadOnce, kStore, kProductBF16, kProductFP16, kKinds };

static const char* const kNames[kKinds] = {"LDTILECFG",   "STTILECFG",  "TILERELEASE", "TILEZERO", "TILELOADD",
                                           "TILELOADDT1", "TILESTORED", "TDPBF16PS",   "TDPFP16PS"};

// As LDTILECFG and STTILECFG have it in memory.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[8], reserved_columns[8];
  uint8_t rows[8], reserved_rows[8];
};

// Tiles are zero behind their configured rows and columns, always.
struct State {
  _Alignas(64) struct Config config;
  _Alignas(64) uint8_t tile[kTiles][kRows][kRowBytes];
};

struct Instruction {
  enum Kind kind;
  int reg, rm, third;  // tiles: ModRM.reg, ModRM.rm, VEX.vvvv
  uintptr_t address, stride;
  uintptr_t next;  // RIP behind it
};

// A signal handler may neither allocate nor touch lazily allocated thread-local storage, and 8 KiB for each thread do
// not fit into what is left for libraries loaded late. So a thread has a pointer in its initial TLS block and takes a
// slot of this table between LDTILECFG and TILERELEASE: without a configuration the tiles hold nothing.
static struct State slots[kSlots];
static atomic_bool taken[kSlots];
static _Thread_local struct State* state __attribute__((tls_model("initial-exec")));
static _Thread_local uintptr_t refused_at __attribute__((tls_model("initial-exec")));

static _Atomic uint64_t counts[kKinds];
static struct sigaction previous;
static const char kUnknown[] = "not an instruction known here";

// ModRM.rm and SIB to an address; `stride` is what the index adds.
static const uint8_t* locate(const uint8_t* modrm, const greg_t* registers, unsigned base_high, unsigned index_high,
                             struct Instruction* to) {
  static const int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const unsigned mod = *modrm >> 6, rm = *modrm & 7;
  const uint8_t* p = modrm + 1;
  unsigned base = rm;
  if (rm == 4) {
    const unsigned index = (*p >> 3 & 7) | index_high << 3;
    if (index != 4) to->stride = (uintptr_t)registers[kRegisters[index]] << (*p >> 6);
    base = *p++ & 7;
  }
  const int no_base = mod == 0 && base == 5;  // a displacement alone, relative to RIP where there is no SIB
  if (!no_base) to->address = (uintptr_t)registers[kRegisters[base | base_high << 3]];
  if (mod == 1) {
    to->address += (uintptr_t)(intptr_t)(int8_t)*p++;
  } else if (mod == 2 || no_base) {
    int32_t displacement;
    memcpy(&displacement, p, 4);
    p += 4;
    to->address += (uintptr_t)(intptr_t)displacement;
  }
  if (no_base && rm == 5) to->address += (uintptr_t)p;
  return p;
}

// NULL, or why not. No byte is read before those in front of it have shown that the instruction has it: the next page
// may not exist. All tile instructions lie in map 0F38, which the two-byte VEX prefix (C5) cannot express.
static const char* decode(const uint8_t* p, const greg_t* registers, struct Instruction* to) {
  if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || (p[2] & 0x84) != 0) return kUnknown;  // VEX.128, map 0F38, W0
  const unsigned prefix = p[2] & 3, opcode = p[3];                                // none, 66, F3, F2
  if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c) return kUnknown;
  const unsigned modrm = p[4], reg = modrm >> 3 & 7, rm = modrm & 7;
  const int in_memory = modrm < 0xc0;
  const unsigned R = !(p[1] & 0x80), X = !(p[1] & 0x40), B = !(p[1] & 0x20), third = ~p[2] >> 3 & 15;
  int kind = kKinds;
  if (opcode == 0x49) {
    if (in_memory && reg == 0) kind = prefix == 0 ? kLoadConfig : prefix == 1 ? kStoreConfig : kKinds;
    if (modrm == 0xc0 && prefix == 0) kind = kRelease;
    if (!in_memory && rm == 0 && prefix == 3) kind = kZero;
  } else if (opcode == 0x4b) {
    if (in_memory && rm == 4) kind = prefix == 3 ? kLoad : prefix == 1 ? kLoadOnce : prefix == 2 ? kStore : kKinds;
  } else if (!in_memory) {
    kind = prefix == 2 ? kProductBF16 : prefix == 3 ? kProductFP16 : kKinds;
  }
  if (kind == kKinds) return kUnknown;
  const int product = kind == kProductBF16 || kind == kProductFP16;
  if (!product && third != 0) return "VEX.vvvv names a register that the instruction does not have";
  if (kind >= kZero && (R || (product && (B || third > 7)))) return "there are only 8 tiles";
  *to = (struct Instruction){.kind = (enum Kind)kind, .reg = (int)reg, .rm = (int)rm, .third = (int)third};
  to->next = (uintptr_t)(in_memory ? locate(p + 4, registers, B, X, to) : p + 5);
  return NULL;
}

static void release(void) {
  if (!state) return;
  atomic_store_explicit(&taken[state - slots], 0, memory_order_release);
  state = NULL;
}

static const char* load_config(const void* from) {
  struct Config c;
  memcpy(&c, from, sizeof c);
  if (c.palette == 0) {
    release();
    return NULL;
  }
  if (c.palette != 1) return "the palette is neither 0 nor 1";
  unsigned reserved = 0;
  for (int i = 0; i < 14; i++) reserved |= c.reserved[i];
  for (int i = 0; i < 8; i++) reserved |= c.reserved_columns[i] | c.reserved_rows[i];
  if (reserved) return "reserved bytes of the configuration are not zero";
  for (int i = 0; i < kTiles; i++) {
    if (c.column_bytes[i] > kRowBytes) return "a tile is configured with more than 64 bytes a row";
    if (c.rows[i] > kRows) return "a tile is configured with more than 16 rows";
    if (!c.rows[i] != !c.column_bytes[i]) return "a tile is configured with rows or columns only";
  }
  for (int i = 0; !state && i < kSlots; i++)
    if (!atomic_exchange_explicit(&taken[i], 1, memory_order_acquire)) state = &slots[i];
  if (!state) return "more threads hold a tile configuration than the emulator has room for";
  state->config = c;
  memset(state->tile, 0, sizeof state->tile);
  return NULL;
}

static int usable(int tile) { return state->config.rows[tile] != 0; }

static const char* check_access(int tile) {
  if (!usable(tile)) return "the tile is not configured";
  if (state->config.column_bytes[tile] % 4) return "the tile's bytes a row are no multiple of 4";
  if (state->config.start_row >= state->config.rows[tile]) return "start_row lies behind the tile's rows";
  return NULL;
}

static const char* check_product(int c, int a, int b) {
  if (c == a || c == b || a == b) return "the three tiles are not distinct";
  if (!usable(a) || !usable(b) || !usable(c)) return "a tile is not configured";
  const uint16_t* bytes = state->config.column_bytes;
  const uint8_t* rows = state->config.rows;
  if (bytes[a] % 4 || bytes[b] % 4 || bytes[c] % 4) return "a tile's bytes a row are no multiple of 4";
  if (bytes[c] != bytes[b]) return "C.colsb is not B.colsb";
  if (bytes[a] / 4 != rows[b]) return "A.colsb / 4 is not B.rows";
  if (rows[c] != rows[a]) return "C.rows is not A.rows";
  return NULL;
}

// For the functions that run only where an instruction is emulated: loading the library must not need AVX-512.
#define VECTORS __attribute__((target("avx512f,avx512bw")))

static VECTORS void load(int tile, const uint8_t* from, uintptr_t stride) {
  uint8_t(*rows)[kRowBytes] = state->tile[tile];
  const __mmask64 columns = ~0ull >> (64 - state->config.column_bytes[tile]);
  const int first = state->config.start_row, end = state->config.rows[tile];
  for (int r = first; r < end; r++)
    _mm512_store_si512(rows[r], _mm512_maskz_loadu_epi8(columns, from + (uintptr_t)r * stride));
  state->config.start_row = 0;
}

static VECTORS void store(int tile, uint8_t* to, uintptr_t stride) {
  const uint8_t(*rows)[kRowBytes] = (const uint8_t(*)[kRowBytes])state->tile[tile];
  const __mmask64 columns = ~0ull >> (64 - state->config.column_bytes[tile]);
  for (int r = state->config.start_row; r < state->config.rows[tile]; r++)
    _mm512_mask_storeu_epi8(to + (uintptr_t)r * stride, columns, _mm512_load_si512(rows[r]));
  state->config.start_row = 0;
}

// 16 pairs to the fp32 values of their even and odd elements. Both conversions are exact; that of fp16 keeps denormal
// numbers whatever MXCSR says, as TDPFP16PS does.
static inline VECTORS void split(const uint8_t* row, int half, __m512* even, __m512* odd) {
  const __m512i x = _mm512_load_si512(row);
  if (half) {
    *even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
    *odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
  } else {
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
  }
}

// A processor that multiplies wrongly, for those who check that.
int tile_emulator_is_wrong = 0;

// The operation as the instruction set reference gives it for TDPBF16PS and TDPFP16PS:
//
//     for each row m of C:
//       even[n] = odd[n] = 0
//       for each k, n:  even[n] = fma(A[m][2k], B[k][2n], even[n]),  odd[n] = fma(A[m][2k + 1], B[k][2n + 1], odd[n])
//       C[m][n] = C[m][n] + (even[n] + odd[n])
//
// in fp32, each step rounded to nearest even, denormal numbers zero on input (not fp16's) and output, no exceptions,
// MXCSR neither read nor written. So C is added last; VDPBF16PS instead starts from C. Not inlined, so that no
// arithmetic moves out of the caller's change of MXCSR.
static __attribute__((noinline)) VECTORS void multiply(int c, int a, int b, int half) {
  const int M = state->config.rows[c], K = state->config.rows[b];
  const __mmask16 columns = (__mmask16)(0xffffu >> (16 - state->config.column_bytes[c] / 4));
  _Alignas(64) float left[2][kRows][16];
  __m512 right[2][kRows];
  for (int k = 0; k < K; k++) split(state->tile[b][k], half, &right[0][k], &right[1][k]);
  for (int m = 0; m < kRows; m++) {
    __m512 even, odd;
    split(state->tile[a][m], half, &even, &odd);
    _mm512_store_ps(left[0][m], even);
    _mm512_store_ps(left[1][m], odd);
  }
  for (int m = 0; m < M; m += 4) {  // 8 sums at once hide the latency; rows of A behind M are zero
    __m512 even[4], odd[4];
    for (int i = 0; i < 4; i++) even[i] = odd[i] = _mm512_setzero_ps();
    for (int k = 0; k < K; k++)
      for (int i = 0; i < 4; i++) {
        even[i] = _mm512_fmadd_ps(_mm512_set1_ps(left[0][m + i][k]), right[0][k], even[i]);
        odd[i] = _mm512_fmadd_ps(_mm512_set1_ps(left[1][m + i][k]), right[1][k], odd[i]);
      }
    for (int i = 0; i < 4 && m + i < M; i++) {
      float* row = (float*)state->tile[c][m + i];
      if (tile_emulator_is_wrong) odd[i] = _mm512_setzero_ps();
      _mm512_store_ps(row, _mm512_maskz_add_ps(columns, _mm512_load_ps(row), _mm512_add_ps(even[i], odd[i])));
    }
  }
  state->config.start_row = 0;
}

// NULL, or why the instruction cannot be performed; then nothing has changed.
static const char* perform(const struct Instruction* x) {
  static const struct Config kNone;
  const char* error = NULL;
  if (!state && x->kind > kRelease) return "tiles are not configured";
  switch (x->kind) {
    case kLoadConfig: error = load_config((const void*)(x->address + x->stride)); break;
    case kStoreConfig:
      memcpy((void*)(x->address + x->stride), state ? &state->config : &kNone, sizeof(struct Config));
      break;
    case kRelease: release(); break;
    case kZero:
      if (!usable(x->reg)) return "the tile is not configured";
      memset(state->tile[x->reg], 0, sizeof state->tile[0]);
      state->config.start_row = 0;
      break;
    case kLoad:
    case kLoadOnce:
      if (!(error = check_access(x->reg))) load(x->reg, (const uint8_t*)x->address, x->stride);
      break;
    case kStore:
      if (!(error = check_access(x->reg))) store(x->reg, (uint8_t*)x->address, x->stride);
      break;
    default: {
      if ((error = check_product(x->reg, x->rm, x->third))) break;
      const unsigned control = _mm_getcsr();
      _mm_setcsr(0x9fc0);  // round to nearest, denormals are zero, flush to zero, exceptions masked
      multiply(x->reg, x->rm, x->third, x->kind == kProductFP16);
      _mm_setcsr(control);
    }
  }
  if (!error) atomic_fetch_add_explicit(&counts[x->kind], 1, memory_order_relaxed);
  return error;
}

static void explain(uintptr_t at, const char* why) {
  static const char kDigits[] = "0123456789abcdef";
  char line[256];
  size_t n = 0;
  const char* text = "tile_emulator: no way to run the instruction at 0x";
  while (*text) line[n++] = *text++;
  for (int shift = 60; shift >= 0; shift -= 4) line[n++] = kDigits[at >> shift & 15];
  line[n++] = ',';
  for (uintptr_t i = at; i < at + 12 && i / 4096 == at / 4096; i++) {  // the next page may not exist
    line[n++] = ' ';
    line[n++] = kDigits[*(const uint8_t*)i >> 4];
    line[n++] = kDigits[*(const uint8_t*)i & 15];
  }
  line[n++] = ':';
  line[n++] = ' ';
  while (*why && n < sizeof line - 1) line[n++] = *why++;
  line[n++] = '\n';
  if (write(STDERR_FILENO, line, n) < 0) return;
}

// To the handler before this one. Where it comes back without having moved on, or is installed above this one too and
// hands the signal down again, the default ends the process.
static void refuse(int number, siginfo_t* info, ucontext_t* context, const char* why) {
  const uintptr_t at = (uintptr_t)context->uc_mcontext.gregs[REG_RIP];
  const int saved = errno, fault = info->si_code > 0;
  const int function =
      previous.sa_flags & SA_SIGINFO || (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN);
  if (function && refused_at != at) {
    if (fault) explain(at, why);
    refused_at = at;
    if (previous.sa_flags & SA_SIGINFO)
      previous.sa_sigaction(number, info, context);
    else
      previous.sa_handler(number);
    if ((uintptr_t)context->uc_mcontext.gregs[REG_RIP] != at) refused_at = 0;
  } else if (fault || previous.sa_handler != SIG_IGN) {
    if (fault && refused_at != at) explain(at, why);
    signal(number, SIG_DFL);
    if (!fault) raise(number);  // a fault comes back by itself, with its own report of where
  }
  errno = saved;
}

static void handle(int number, siginfo_t* info, void* context_) {
  ucontext_t* context = context_;
  greg_t* registers = context->uc_mcontext.gregs;
  struct Instruction x;
  const char* error = info->si_code > 0 ? NULL : "sent, not a fault";
  if (!error) error = decode((const uint8_t*)registers[REG_RIP], registers, &x);
  if (!error) error = perform(&x);
  if (error) {
    refuse(number, info, context, error);
    return;
  }
  refused_at = 0;
  // Tile instructions come in runs, and the signal costs several times what they do: perform those that follow at once.
  // One that cannot be performed is left to fault by itself.
  do {
    registers[REG_RIP] = (greg_t)x.next;
  } while (!decode((const uint8_t*)x.next, registers, &x) && !perform(&x));
}

// Again after another handler has been installed, it goes on top of that.
void tile_emulator_install(void) {
  struct sigaction action, now;
  if (sigaction(SIGILL, NULL, &now) == 0 && now.sa_flags & SA_SIGINFO && now.sa_sigaction == handle) return;
  previous = now;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_RESTART;  // on the thread's own stack: an alternative one is often too small
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGILL, &action, NULL)) perror("tile_emulator: sigaction");
}

static __attribute__((constructor)) void install_at_load(void) { tile_emulator_install(); }

// Tile products so far, of all threads.
uint64_t tile_emulator_count(void) {
  return atomic_load_explicit(&counts[kProductBF16], memory_order_relaxed) +
         atomic_load_explicit(&counts[kProductFP16], memory_order_relaxed);
}

// Instructions so far with this mnemonic, in capitals; 0 for unknown ones.
uint64_t tile_emulator_count_of(const char* name) {
  for (int i = 0; i < kKinds; i++)
    if (!strcmp(name, kNames[i])) return atomic_load_explicit(&counts[i], memory_order_relaxed);
  return 0;
}
