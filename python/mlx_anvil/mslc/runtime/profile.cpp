#include "profile.h"

#include <string.h>

#include "worker.h"

namespace mslc {
namespace {

constexpr uint64_t kLine = 128;  // bytes per cache line
constexpr uint64_t kWord = 4;    // bytes per word of a bank
constexpr unsigned kBanks = 32;

uint64_t divide_up(uint64_t a, uint64_t b) {
  return (a + b - 1) / b;
}

size_t hash(const void* pc, int buffer, int kind) {
  auto value = reinterpret_cast<uintptr_t>(pc) * 8 + static_cast<unsigned>(kind);
  return (value ^ static_cast<uintptr_t>(buffer + 1) << 40) * 0x9E3779B97F4A7C15 >> 16;
}

// The bytes accessed by one lane.
struct Span {
  int buffer;
  uint64_t begin, end;
};

bool before(const Span& a, const Span& b) {
  return a.buffer != b.buffer ? a.buffer < b.buffer : a.begin < b.begin;
}

// The spans of the active lanes, sorted.
class Spans {
 public:
  // Neighbouring lanes mostly access neighbouring bytes, so insertion sort is fast.
  void insert(const Span& span) {
    unsigned at = count_++;
    for (; at && before(span, spans_[at - 1]); --at) spans_[at] = spans_[at - 1];
    spans_[at] = span;
  }

  // Calls `visit` for ranges of units (bytes, words, lines) of `size` bytes that the spans touch.
  // Each unit is visited once.
  template <class Visit>
  void for_each_range(uint64_t size, Visit visit) const {
    uint64_t next = 0;  // first unit that may not have been visited
    for (unsigned i = 0; i < count_; ++i) {
      const Span& span = spans_[i];
      if (i && span.buffer != spans_[i - 1].buffer) next = 0;
      uint64_t first = span.begin / size;
      const uint64_t last = divide_up(span.end, size);
      if (first < next) first = next;
      if (first >= last) continue;
      visit(first, last);
      next = last;
    }
  }

  uint64_t count_units(uint64_t size) const {
    uint64_t total = 0;
    for_each_range(size, [&](uint64_t begin, uint64_t end) { total += end - begin; });
    return total;
  }

  // A bank delivers one word per cycle. Lanes that access the same word share it.
  uint64_t bank_cycles() const {
    uint64_t load[kBanks] = {}, longest = 0;
    for_each_range(kWord, [&](uint64_t begin, uint64_t end) {
      for (uint64_t word = begin; word < end; ++word) ++load[word % kBanks];
    });
    for (uint64_t queue : load)
      if (queue > longest) longest = queue;
    return longest;
  }

 private:
  Span spans_[MSLC_SIMD_WIDTH];
  unsigned count_ = 0;
};

}  // namespace

// ---- unique bytes ------------------------------------------------------------------------------

void ByteSet::resize(uint64_t bytes) {
  word_count_ = divide_up(bytes, 64);
  words_ = static_cast<uint64_t*>(calloc(word_count_ ? word_count_ : 1, sizeof(uint64_t)));
  if (!words_) abort();
}

void ByteSet::insert(uint64_t begin, uint64_t end) {
  while (begin < end && begin / 64 < word_count_) {
    const uint64_t in_word = begin % 64, left = end - begin;
    const uint64_t bits = left < 64 - in_word ? left : 64 - in_word;
    uint64_t& word = words_[begin / 64];
    if (!word) used_.push(begin / 64);
    word |= (~uint64_t{0} >> (64 - bits)) << in_word;
    begin += bits;
  }
}

uint64_t ByteSet::count() const {
  uint64_t total = 0;
  for (uint64_t i : used_) total += static_cast<unsigned>(__builtin_popcountll(words_[i]));
  return total;
}

uint64_t ByteSet::take() {
  const uint64_t total = count();
  for (uint64_t i : used_) words_[i] = 0;
  used_.clear();
  return total;
}

// ---- recording ---------------------------------------------------------------------------------

Profile::Profile(const mslc_launch& request) {
  for (unsigned i = 0; i < request.buffer_count && i < MSLC_MAX_BUFFERS; ++i) {
    const uint64_t size = request.buffers[i].size;
    read_[i].resize(size);
    written_[i].resize(size);
    read_here_[i].resize(size);
    written_here_[i].resize(size);
  }
  grow_table();
}

void Profile::synchronise(unsigned simdgroup) {
  Array<Access>* lanes = lanes_ + simdgroup * MSLC_SIMD_WIDTH;
  size_t next[MSLC_SIMD_WIDTH] = {};
  for (;;) {
    const void* pc = nullptr;
    for (unsigned i = 0; i < MSLC_SIMD_WIDTH; ++i) {
      if (next[i] == lanes[i].size()) continue;
      const void* candidate = lanes[i][next[i]].pc;
      if (!pc || candidate < pc) pc = candidate;
    }
    if (!pc) break;
    const Access* together[MSLC_SIMD_WIDTH];
    unsigned count = 0;
    for (unsigned i = 0; i < MSLC_SIMD_WIDTH; ++i)
      if (next[i] < lanes[i].size() && lanes[i][next[i]].pc == pc)
        together[count++] = &lanes[i][next[i]++];
    simd_access(together, count);
  }
  for (unsigned i = 0; i < MSLC_SIMD_WIDTH; ++i) lanes[i].clear();
}

void Profile::finish_threadgroup() {
  for (unsigned i = 0; i < MSLC_MAX_BUFFERS; ++i)
    bytes_of_threadgroups_[i] += read_here_[i].take() + written_here_[i].take();
}

void Profile::simd_access(const Access* const* accesses, unsigned count) {
  Spans spans;
  uint64_t bytes = 0;
  for (unsigned i = 0; i < count; ++i) {
    const Access& access = *accesses[i];
    const uint64_t end = access.offset + access.size;
    spans.insert({access.buffer, access.offset, end});
    bytes += access.size;
    if (access.buffer == Access::kThreadgroup) continue;
    if (is_write(access.kind)) {
      written_[access.buffer].insert(access.offset, end);
      written_here_[access.buffer].insert(access.offset, end);
    }
    if (!is_write(access.kind) || is_atomic(access.kind)) {
      read_[access.buffer].insert(access.offset, end);
      read_here_[access.buffer].insert(access.offset, end);
    }
  }
  const bool in_threadgroup_memory = accesses[0]->buffer == Access::kThreadgroup;
  mslc_profile_site& counted = site(*accesses[0]);
  ++counted.accesses;
  counted.lanes += count;
  counted.bytes += bytes;
  counted.transactions += in_threadgroup_memory ? spans.bank_cycles() : spans.count_units(kLine);
  counted.ideal_transactions += in_threadgroup_memory ? divide_up(spans.count_units(kWord), kBanks)
                                                      : divide_up(spans.count_units(1), kLine);
}

mslc_profile_site& Profile::site(const Access& access) {
  const int kind = static_cast<int>(access.kind);
  size_t slot = hash(access.pc, access.buffer, kind) & (table_size_ - 1);
  for (; table_[slot]; slot = (slot + 1) & (table_size_ - 1)) {
    mslc_profile_site& found = sites_[table_[slot] - 1];
    if (found.pc == access.pc && found.buffer == access.buffer && found.kind == kind) return found;
  }
  mslc_profile_site fresh = {};
  fresh.pc = access.pc;
  fresh.buffer = access.buffer;
  fresh.kind = kind;
  sites_.push(fresh);
  table_[slot] = static_cast<uint32_t>(sites_.size());
  if (2 * sites_.size() > table_size_) grow_table();
  return sites_[sites_.size() - 1];
}

void Profile::grow_table() {
  free(table_);
  table_size_ = table_size_ ? 2 * table_size_ : 256;
  table_ = static_cast<uint32_t*>(calloc(table_size_, sizeof(uint32_t)));
  if (!table_) abort();
  for (size_t i = 0; i < sites_.size(); ++i) {
    size_t slot = hash(sites_[i].pc, sites_[i].buffer, sites_[i].kind) & (table_size_ - 1);
    while (table_[slot]) slot = (slot + 1) & (table_size_ - 1);
    table_[slot] = static_cast<uint32_t>(i + 1);
  }
}

void Profile::write(mslc_profile& result) {
  result.site_count = static_cast<unsigned>(sites_.size());
  result.sites = sites_.release();
  for (unsigned i = 0; i < MSLC_MAX_BUFFERS; ++i) {
    result.bytes_read[i] = read_[i].count();
    result.bytes_written[i] = written_[i].count();
    result.bytes_of_threadgroups[i] = bytes_of_threadgroups_[i];
  }
  for (unsigned i = 0; i < MSLC_COUNT_KINDS; ++i) result.counts[i] = counts_[i];
  result.collective_lanes = collective_lanes_;
}

void profile_access(Worker& worker, const Access& access) {
  worker.launch().profile->access(worker.thread().descriptor.index, access);
}

}  // namespace mslc

extern "C" void mslc_count(int what, unsigned int amount) {
  if (mslc::Profile* profile = mslc::Worker::current()->launch().profile)
    profile->count(what, amount);
}

extern "C" void mslc_profile_clear(mslc_profile* profile) {
  free(profile->sites);
  memset(profile, 0, sizeof *profile);
}
