#include "division.h"

#if defined(__x86_64__)

#include <stdint.h>
#include <stdio.h>
#include <ucontext.h>

#include "signals.h"
#include "worker.h"

namespace mslc {
namespace {

struct sigaction previous;

struct Division {
  unsigned length;  // of the instruction in bytes; 0 if it is no division
  unsigned bits;    // of its operands
};

Division decode(const uint8_t* code) {
  const uint8_t* at = code;
  const bool is_short = *at == 0x66;
  if (is_short) ++at;
  const bool has_rex = (*at & 0xF0) == 0x40, is_long = has_rex && *at & 8;
  if (has_rex) ++at;
  if (*at != 0xF6 && *at != 0xF7) return {};
  const unsigned bits = *at == 0xF6 ? 8 : is_long ? 64 : is_short ? 16 : 32;
  const uint8_t modrm = *++at;
  const unsigned mode = modrm >> 6, operation = modrm >> 3 & 7, base = modrm & 7;
  if (operation < 6) return {};  // 6: div, 7: idiv
  ++at;
  bool no_base = base == 5;
  if (mode != 3 && base == 4) no_base = (*at++ & 7) == 5;  // address with an index
  if (mode == 1) at += 1;
  if (mode == 2 || (mode == 0 && no_base)) at += 4;
  return {static_cast<unsigned>(at - code), bits};
}

// Sets all bits of the result registers of a `bits`-wide division: al and ah, or two registers.
void write_result(greg_t* registers, unsigned bits) {
  const uint64_t written = bits == 8    ? 0xFFFF
                           : bits == 64 ? ~uint64_t{0}
                                        : (uint64_t{1} << bits) - 1;
  auto write = [&](greg_t& target) {
    const auto kept = bits == 32 ? 0 : static_cast<uint64_t>(target) & ~written;
    target = static_cast<greg_t>(kept | written);
  };
  write(registers[REG_RAX]);
  if (bits != 8) write(registers[REG_RDX]);
}

// Checked kernels contain checks for zero. This also catches the lowest number divided by -1.
void report(greg_t pc) {
  Worker& worker = *Worker::current();
  if (!worker.in_kernel() || !(worker.launch().request->flags & MSLC_CHECKED)) return;
  mslc_finding finding =
      worker.finding(MSLC_FINDING_ARITHMETIC, nullptr, reinterpret_cast<const void*>(pc));
  snprintf(finding.message, sizeof finding.message, "%s", kNoQuotient);
  worker.report(finding);
}

void handle(int signal, siginfo_t* info, void* context) {
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  if (const Division division = Worker::current() ? decode(code) : Division{}; division.length) {
    report(registers[REG_RIP] + 1);
    write_result(registers, division.bits);
    registers[REG_RIP] += division.length;
  } else {
    pass_on(previous, signal, info, context);
  }
}

}  // namespace

void survive_division() {
  install_handler(SIGFPE, handle, previous);
}

}  // namespace mslc

#else

namespace mslc {
void survive_division() {}  // arm64 gives 0 without a trap
}  // namespace mslc

#endif
