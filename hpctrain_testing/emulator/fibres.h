// Fibres: functions that run on stacks of their own and hand over to each other by `cpu_switch`, which takes a few nanoseconds.
#pragma once
#include <cstddef>
#include <cstdint>
#include <sys/mman.h>
#include <unistd.h>

// Keeps the registers that a callee keeps on the stack, leaves the stack's pointer in *from and goes on with the stack `to`.
#if defined(__x86_64__) && !defined(CPU_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void cpu_switch(void** from, void* to);
asm(R"(
  .text
  .globl cpu_switch
  .hidden cpu_switch
  .type cpu_switch, @function
cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cpu_switch, .-cpu_switch
)");
#elif defined(__aarch64__) && !defined(CPU_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void cpu_switch(void** from, void* to);
asm(R"(
  .text
  .globl cpu_switch
  .hidden cpu_switch
  .type cpu_switch, %function
cpu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size cpu_switch, .-cpu_switch
)");
#else
#include <ucontext.h>
namespace cpu {
// A stack's pointer is the address of its ucontext_t, which lies at the stack's upper end or, for the stack of the caller, here.
static ucontext_t caller_context;
static ucontext_t* running_context = &caller_context;
}
static inline void cpu_switch(void** from, void* to) {
  ucontext_t* left = cpu::running_context;
  *from = left;
  cpu::running_context = static_cast<ucontext_t*>(to);
  swapcontext(left, cpu::running_context);
}
#endif

namespace cpu {

constexpr size_t STACK_BYTES = 64 << 10, PAGE_BYTES = 64 << 10;  // multiples of any system's page

// Makes a stack whose first switch enters `entry`, which never returns. `top` is its upper end, a multiple of 64.
static inline void* new_stack(char* top, void (*entry)()) {
#if defined(__x86_64__) && !defined(CPU_UCONTEXT)
  void** place = reinterpret_cast<void**>(top - 64);
  for (int i = 0; i < 8; i++) place[i] = nullptr;
  place[6] = reinterpret_cast<void*>(entry);  // six registers below the address of return, which is a multiple of 16
  return place;
#elif defined(__aarch64__) && !defined(CPU_UCONTEXT)
  void** place = reinterpret_cast<void**>(top - 192);
  for (int i = 0; i < 24; i++) place[i] = nullptr;
  place[11] = reinterpret_cast<void*>(entry);  // x30
  return place;
#else
  ucontext_t* context = reinterpret_cast<ucontext_t*>(top - (sizeof(ucontext_t) + 63) / 64 * 64);
  getcontext(context);
  context->uc_stack.ss_sp = top - STACK_BYTES / 2;
  context->uc_stack.ss_size = reinterpret_cast<char*>(context) - static_cast<char*>(context->uc_stack.ss_sp);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
#endif
}

// Memory between two pages that must not be touched.
static inline char* guarded(size_t bytes) {
  const size_t size = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  void* memory = mmap(nullptr, size + 2 * PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  char* inside = static_cast<char*>(memory) + PAGE_BYTES;
  return mprotect(inside, size, PROT_READ | PROT_WRITE) ? nullptr : inside;
}

}  // namespace cpu
