// How a kernel is launched on the machine, block by block, and what becomes of a fault inside of one.
#pragma once
#include "machine.h"

namespace cpu {

// ---- faults -------------------------------------------------------------------------------------------------------------------

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous[4];

static void on_signal(int number, siginfo_t* info, void*) {
  if (machine.running && pthread_equal(pthread_self(), machine.owner)) {
    if (number == SIGFPE) fail("divides by zero.");
    if (number == SIGILL) fail("comes to an instruction that this machine does not have.");
    if (info->si_code == SI_KERNEL) fail("touches memory at an address that is not aligned as its type, or is none.");
    fail("touches memory at %p that is not the kernel's.", info->si_addr);
  }
  for (int i = 0; i < 4; i++)  // somebody else's: happens again, and goes to the handler of before
    if (SIGNALS[i] == number) sigaction(number, &previous[i], nullptr);
}

struct FaultHandlers {  // while a kernel runs
  stack_t before;
  FaultHandlers() {
    static char* memory = guarded(64 << 10);
    stack_t own{};
    own.ss_sp = memory, own.ss_size = 64 << 10;
    sigaltstack(&own, &before);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // left by cpu_switch, not by a return
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &previous[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
    sigaltstack(&before, nullptr);
  }
};

// ---- launches -----------------------------------------------------------------------------------------------------------------

// Makes the stacks of the runner and of as many threads as a block has. Each stack is a mapping between two guards. A process may
// have 65,530 mappings, so a library of small blocks leaves room for other libraries.
static bool make_fibres(unsigned threads) {
  constexpr size_t each = STACK_BYTES + PAGE_BYTES;
  const auto open = [](size_t i) {
    return mprotect(machine.stacks + i * each + PAGE_BYTES, STACK_BYTES, PROT_READ | PROT_WRITE) == 0;
  };
  const auto make = [](Fibre& f, unsigned i) {  // stacks begin at different lines of the cache
    f.number = i;
    f.stack = new_stack(machine.stacks + (i + 1) * each - i % 32 * 128, fibre_main);
  };
  if (!machine.stacks) {
    void* memory = mmap(nullptr, each * (MOST_THREADS + 1), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    machine.stacks = static_cast<char*>(memory);
    machine.broken = true;
    if (!open(MOST_THREADS)) return false;
  }
  unsigned first = machine.broken ? 0 : machine.opened;
  for (; machine.opened < threads; machine.opened++)
    if (!open(machine.opened)) return false;
  for (; first < machine.opened; first++) make(machine.fibres[first], first);
  if (machine.broken) make(machine.runner, MOST_THREADS);
  machine.broken = false;
  return true;
}

static void run_block() {
  machine.threads = block_size.x * block_size.y * block_size.z;
  machine.at_barrier = machine.ended = machine.position = machine.woken_count = machine.arrays = machine.shared_bytes = 0;
  machine.ready_count = machine.threads;
  machine.warps_go_ahead = random_below(2);
  uint3 index{0, 0, 0};
  for (unsigned i = 0; i < machine.threads; i++) {
    machine.fibres[i].state = State::RUNS, machine.fibres[i].index = index, machine.ready[i] = i;
    if (++index.x == block_size.x) {
      index.x = 0;
      if (++index.y == block_size.y) index.y = 0, index.z++;
    }
  }
  shuffle(machine.ready, machine.threads);
  machine.current = next_fibre();
  thread_index = machine.current->index;
  cpu_switch(&machine.caller, machine.current->stack);
}

static void place_block(uint64_t number) {
  block_index.x = unsigned(number % grid_size.x), number /= grid_size.x;
  block_index.y = unsigned(number % grid_size.y), block_index.z = unsigned(number / grid_size.y);
}

// All threads of a kernel without waits, one after the other in an odd order.
template <void (*thread)(void**)> static void run_independent_block(void** arguments) {
  const uint64_t n = uint64_t(block_size.x) * block_size.y * block_size.z;
  Walk numbers(n);
  for (uint64_t i = 0; i < n; i++) {
    const unsigned number = unsigned(numbers.next());
    thread_index = {number % block_size.x, number / block_size.x % block_size.y, number / block_size.x / block_size.y};
    thread(arguments);
  }
}

struct Launch {  // as the caller passes it
  unsigned grid[3], block[3];
  uint64_t seed;
  char message[512];
};

static void run_blocks() {
  const uint64_t blocks = uint64_t(grid_size.x) * grid_size.y * grid_size.z;
  Walk numbers(blocks);
  for (uint64_t i = 0; i < blocks && !machine.broken; i++) {
    place_block(numbers.next());
    if (machine.independent) {
      machine.current = &machine.runner;
      cpu_switch(&machine.caller, machine.runner.stack);
    } else {
      run_block();
    }
  }
}

// Returns 0, or 1 and a message.
static int launch(const char* name, void (*entry)(void**), bool independent, void** arguments, Launch* request) {
  machine.name = name, machine.entry = entry, machine.arguments = arguments, machine.independent = independent;
  machine.message = request->message, machine.message_bytes = sizeof request->message;
  machine.random = (request->seed + 1) * 0x9E3779B97F4A7C15ull | 1;
  machine.owner = pthread_self();
  grid_size = {request->grid[0], request->grid[1], request->grid[2]};
  block_size = {request->block[0], request->block[1], request->block[2]};
  const unsigned threads = independent ? 0 : block_size.x * block_size.y * block_size.z;
  if ((!machine.stacks || machine.broken || machine.opened < threads) && !make_fibres(threads)) {
    snprintf(request->message, sizeof request->message, "Kernel %s: no memory for its threads.", name);
    machine.broken = true;
    return 1;
  }
  FaultHandlers handlers;
  machine.running = true;
  run_blocks();
  machine.running = false;
  return machine.broken;
}

}  // namespace cpu
