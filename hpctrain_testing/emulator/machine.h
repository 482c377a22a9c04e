// Runs one kernel at a time, block by block. Every thread of a block is a fibre; a kernel whose threads never wait for each other
// runs them one after the other on a single fibre. Everything here is static: each built library has a machine of its own.
#pragma once
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include "fibres.h"

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace cpu {

constexpr unsigned WARP = 32, MOST_THREADS = 1024, MOST_ARRAYS = 16, MOST_SHARED_BYTES = 48 << 10;
constexpr unsigned CANARY_BYTES = 256, VALUE_BYTES = 16;

enum class State { RUNS, AT_BARRIER, IN_WARP, ENDED };
enum class Exchange { NONE, VALUES, BALLOT };

struct Fibre {
  void* stack;
  uint3 index;
  unsigned number;
  State state;
  const char* place;  // in the source, of what it waits for
  unsigned mask, source, ballot;
  Exchange exchange;
  alignas(16) char offered[VALUE_BYTES], received[VALUE_BYTES];
};

struct SharedMemory {  // one declaration of SHARED; its array ends at a page that must not be touched
  const void* declaration;
  char *end, *array;
  size_t bytes;
};

struct Machine {
  // of a launch
  const char* name;
  void (*entry)(void**);
  void** arguments;
  bool independent, running;
  char* message;
  size_t message_bytes;
  uint64_t random;
  pthread_t owner;
  void* caller;  // its stack
  // of a block
  unsigned threads, alive, at_barrier, ended, ready_count, position, woken_count, arrays, shared_bytes;
  bool warps_go_ahead;
  Fibre* current;
  unsigned ready[MOST_THREADS], woken[MOST_THREADS];
  SharedMemory shared[MOST_ARRAYS];
  // as long as the library
  Fibre fibres[MOST_THREADS];
  Fibre runner;  // of independent kernels
  char* stacks;
  unsigned opened;  // stacks of threads that have been made
  bool broken;  // fibres were left in the middle of a kernel
};

static Machine machine;
static uint3 thread_index, block_index;
static dim3 block_size, grid_size;

static inline uint32_t random_below(uint32_t n) {
  uint64_t& x = machine.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return uint32_t((uint64_t(uint32_t(x >> 16)) * n) >> 32);
}

static inline void shuffle(unsigned* items, unsigned n) {
  for (unsigned i = n; i > 1; i--) {
    const unsigned j = random_below(i), kept = items[i - 1];
    items[i - 1] = items[j], items[j] = kept;
  }
}

// The numbers below n in an odd order, without a table: steps of a random length that has no divisor in common with n.
struct Walk {
  uint64_t n, step, at;
  explicit Walk(uint64_t count) : n(count), step(1), at(0) {
    if (n < 2) return;
    for (int i = 0; i < 16; i++) {
      const uint64_t candidate = 1 + random_below(uint32_t(n - 1 < 0xffffffff ? n - 1 : 0xffffffff));
      uint64_t a = candidate, b = n;
      while (b) { const uint64_t rest = a % b; a = b, b = rest; }
      if (a == 1) { step = candidate; break; }
    }
    at = random_below(uint32_t(n < 0xffffffff ? n : 0xffffffff));
  }
  uint64_t next() {
    const uint64_t now = at;
    at += step;
    if (at >= n) at -= n;
    return now;
  }
};

// Ends the launch with a message, from within a kernel.
[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
  const uint3 &b = block_index, &t = thread_index;
  const char* const start = "Kernel %s, block (%u, %u, %u), thread (%u, %u, %u): ";
  const int used = snprintf(machine.message, machine.message_bytes, start, machine.name, b.x, b.y, b.z, t.x, t.y, t.z);
  va_list rest;
  va_start(rest, format);
  if (used > 0 && size_t(used) < machine.message_bytes)
    vsnprintf(machine.message + used, machine.message_bytes - used, format, rest);
  va_end(rest);
  machine.broken = true;
  void* left;
  cpu_switch(&left, machine.caller);
  __builtin_unreachable();
}

// ---- shared memory ------------------------------------------------------------------------------------------------------------

static void refuse_if_independent(const char* place) {
  if (machine.independent) fail("waits in %s, though it is exported as a kernel whose threads do not wait for each other.", place);
}

static void* shared_array(const void* declaration, size_t bytes, const char* name) {
  refuse_if_independent(name);
  for (unsigned i = 0; i < machine.arrays; i++)
    if (machine.shared[i].declaration == declaration) return machine.shared[i].array;
  machine.shared_bytes += bytes;
  if (machine.shared_bytes > MOST_SHARED_BYTES)
    fail("asks for %u bytes of shared memory; a block has %u.", machine.shared_bytes, MOST_SHARED_BYTES);
  if (machine.arrays == MOST_ARRAYS) fail("declares more than %u arrays of shared memory.", MOST_ARRAYS);
  SharedMemory& memory = machine.shared[machine.arrays++];
  const size_t room = MOST_SHARED_BYTES + CANARY_BYTES;
  if (!memory.end) {
    char* begin = guarded(room);
    if (!begin) fail("gets no memory from this machine.");
    memory.end = begin + (room + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  }
  memory.declaration = declaration, memory.bytes = bytes, memory.array = memory.end - (bytes + 15) / 16 * 16;
  // NaN: what was not written must not be read
  memset(memory.array - CANARY_BYTES, 0xFF, size_t(memory.end - memory.array) + CANARY_BYTES);
  return memory.array;
}

static bool untouched(const char* begin, const char* end) {
  for (; begin < end; begin++)
    if (*begin != char(0xFF)) return false;
  return true;
}

static void check_shared() {
  for (unsigned i = 0; i < machine.arrays; i++) {
    const SharedMemory& memory = machine.shared[i];
    if (!untouched(memory.array - CANARY_BYTES, memory.array))
      fail("or another of its block writes in front of an array in shared memory.");
    if (!untouched(memory.array + memory.bytes, memory.end))
      fail("or another of its block writes after the end of an array in shared memory.");
  }
}

// ---- which fibre goes on ------------------------------------------------------------------------------------------------------

static bool is_same(const char* place, const char* other) { return place == other || !strcmp(place, other); }

static void release_block() {
  const Fibre* first = nullptr;
  for (unsigned i = 0; i < machine.threads; i++) {
    const Fibre& f = machine.fibres[i];
    if (f.state != State::AT_BARRIER || (first && !is_same(first->place, f.place))) {
      const Fibre* other = first;
      for (unsigned j = 0; !other; j++) other = machine.fibres[j].state == State::AT_BARRIER ? &machine.fibres[j] : nullptr;
      thread_index = f.index;
      const uint3& o = other->index;
      if (f.state == State::ENDED) fail("has ended, and thread (%u, %u, %u) waits for it in %s.", o.x, o.y, o.z, other->place);
      fail("waits in %s, and thread (%u, %u, %u) in %s.", f.place, o.x, o.y, o.z, other->place);
    }
    first = &f;
  }
  for (unsigned i = 0; i < machine.threads; i++) machine.fibres[i].state = State::RUNS, machine.ready[i] = i;
  machine.ready_count = machine.threads, machine.at_barrier = 0;
}

[[noreturn]] static void fail_in_warp() {
  for (unsigned i = 0; i < machine.threads; i++) {
    const Fibre& f = machine.fibres[i];
    if (f.state != State::IN_WARP) continue;
    thread_index = f.index;
    for (unsigned lane = 0; lane < WARP; lane++) {
      const unsigned other = i / WARP * WARP + lane;
      if (!(f.mask >> lane & 1)) continue;
      if (other >= machine.threads) fail("waits in %s for lane %u, which its warp does not have.", f.place, lane);
      const Fibre& g = machine.fibres[other];
      if (g.state == State::ENDED) fail("waits in %s for lane %u, which has ended.", f.place, lane);
      if (g.state == State::AT_BARRIER || !is_same(f.place, g.place))
        fail("waits in %s for lane %u, which waits in %s.", f.place, lane, g.place);
      if (g.mask != f.mask) fail("waits in %s with the mask %#x, and lane %u with the mask %#x.", f.place, f.mask, lane, g.mask);
    }
  }
  fail("waits without end.");
}

// The fibre that runs next; null when the block is done. In half of all blocks, by chance, warps go ahead of the others: lanes
// that have exchanged values run before threads that have not yet come so far; else all go from exchange to exchange together.
static Fibre* next_fibre() {
  if (machine.warps_go_ahead && machine.woken_count) {
    const unsigned k = random_below(machine.woken_count), number = machine.woken[k];
    machine.woken[k] = machine.woken[--machine.woken_count];
    return &machine.fibres[number];
  }
  if (machine.position == machine.ready_count) {
    machine.position = machine.ready_count = 0;
    if (machine.woken_count) {
      memcpy(machine.ready, machine.woken, machine.woken_count * sizeof(unsigned));
      machine.ready_count = machine.woken_count, machine.woken_count = 0;
    } else if (machine.ended == machine.threads) {
      check_shared();
      return nullptr;
    } else if (machine.at_barrier + machine.ended < machine.threads) {
      fail_in_warp();
    } else {
      release_block();
    }
    shuffle(machine.ready, machine.ready_count);
  }
  return &machine.fibres[machine.ready[machine.position++]];
}

static void hand_over() {
  Fibre *self = machine.current, *next = next_fibre();
  if (next) machine.current = next, thread_index = next->index;
  if (next != self) cpu_switch(&self->stack, next ? next->stack : machine.caller);
}

static void fibre_main() {
  for (;;) {  // a thread each time, or a whole block of an independent kernel
    machine.entry(machine.arguments);
    if (machine.independent) {
      cpu_switch(&machine.runner.stack, machine.caller);
      continue;
    }
    machine.current->state = State::ENDED;
    machine.ended++;
    hand_over();
  }
}

// ---- what threads do together -------------------------------------------------------------------------------------------------

static void block_barrier(const char* place) {
  refuse_if_independent(place);
  Fibre& f = *machine.current;
  f.state = State::AT_BARRIER, f.place = place;
  machine.at_barrier++;
  hand_over();
}

static void exchange(Fibre* lanes, unsigned mask) {
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < WARP; lane++)
    if (mask >> lane & 1 && lanes[lane].offered[0]) ballot |= 1u << lane;
  for (unsigned lane = 0; lane < WARP; lane++) {
    if (!(mask >> lane & 1)) continue;
    Fibre& f = lanes[lane];
    if (f.exchange == Exchange::VALUES) {
      thread_index = f.index;
      if (!(mask >> f.source & 1)) fail("asks in %s for the value of lane %u, which takes no part.", f.place, f.source);
      memcpy(f.received, lanes[f.source].offered, VALUE_BYTES);
    }
    f.ballot = ballot;
    f.state = State::RUNS;
    machine.woken[machine.woken_count++] = f.number;
  }
}

// Waits until all lanes of the mask are at the same place, then each has its value.
static void warp_barrier(const char* place, unsigned mask, Exchange what, unsigned source) {
  refuse_if_independent(place);
  Fibre& self = *machine.current;
  Fibre* lanes = machine.fibres + self.number / WARP * WARP;
  if (!(mask >> self.number % WARP & 1)) fail("is not in the mask %#x of %s.", mask, place);
  self.state = State::IN_WARP, self.place = place, self.mask = mask, self.exchange = what, self.source = source;
  bool complete = true;
  for (unsigned lane = 0; complete && lane < WARP; lane++) {
    if (!(mask >> lane & 1)) continue;
    const Fibre& f = lanes[lane];
    complete = f.number < machine.threads && f.state == State::IN_WARP && f.mask == mask && is_same(f.place, place);
  }
  if (complete) exchange(lanes, mask);
  hand_over();
}

static unsigned lane_number() { return machine.current->number % WARP; }

template <class T> static T shuffled(const char* place, unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= VALUE_BYTES, "a lane exchanges at most 16 bytes at once");
  refuse_if_independent(place);
  Fibre& self = *machine.current;
  memcpy(self.offered, &value, sizeof(T));
  warp_barrier(place, mask, Exchange::VALUES, source);
  memcpy(&value, self.received, sizeof(T));
  return value;
}

static inline unsigned ballot(const char* place, unsigned mask, bool vote) {
  refuse_if_independent(place);
  machine.current->offered[0] = vote;
  warp_barrier(place, mask, Exchange::BALLOT, 0);
  return machine.current->ballot;
}

static inline void require_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("loads or stores %zu bytes at once at %p, no multiple of it.", bytes, p);
}

}  // namespace cpu
