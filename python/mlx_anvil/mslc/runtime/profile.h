// Counts the memory accesses of a launch per SIMD group, as a GPU would execute them.
//
// The simulator runs lanes one after the other, so it first records the accesses of each lane. When
// all lanes of a SIMD group have met, it replays the records like a GPU with diverged lanes: the
// lanes whose next access is earliest in the program run together and make one access of the SIMD
// group. So lanes that leave a loop early wait behind it for the others, and lanes in different
// branches are counted separately.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "abi.h"
#include "access.h"

namespace mslc {

// std::vector for plain data, in a runtime without the C++ library.
template <class T>
class Array {
 public:
  Array() = default;
  ~Array() { free(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  void clear() { size_ = 0; }
  T& push(const T& value) {
    if (size_ == capacity_) {
      capacity_ = capacity_ ? 2 * capacity_ : 64;
      data_ = static_cast<T*>(realloc(static_cast<void*>(data_), capacity_ * sizeof(T)));
      if (!data_) abort();
    }
    return data_[size_++] = value;
  }
  T* release() {
    T* data = data_;
    data_ = nullptr;
    size_ = capacity_ = 0;
    return data;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

// One bit per byte of a buffer.
class ByteSet {
 public:
  ~ByteSet() { free(words_); }
  void resize(uint64_t bytes);
  void insert(uint64_t begin, uint64_t end);
  uint64_t count() const;
  // Returns the count and removes all bytes. Takes as long as inserting them did.
  uint64_t take();

 private:
  uint64_t* words_ = nullptr;
  uint64_t word_count_ = 0;
  Array<uint64_t> used_;  // words with bytes
};

// Counts one launch, which runs on one host thread.
class Profile {
 public:
  explicit Profile(const mslc_launch& request);
  ~Profile() { free(table_); }
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  void access(unsigned thread, const Access& access) { lanes_[thread].push(access); }
  void count(int what, uint64_t amount) { counts_[what] += amount; }
  // Counts a SIMD-group operation of the lanes in `active`.
  void collective(uint32_t active) { collective_lanes_ += __builtin_popcount(active); }
  // Must be called when all running lanes of a SIMD group have met, or all have returned.
  void synchronise(unsigned simdgroup);
  void finish_threadgroup();

  void write(mslc_profile& result);

 private:
  void simd_access(const Access* const* accesses, unsigned count);
  mslc_profile_site& site(const Access& access);
  void grow_table();

  Array<Access> lanes_[MSLC_MAX_THREADS_PER_THREADGROUP];
  Array<mslc_profile_site> sites_;
  uint32_t* table_ = nullptr;  // open addressing: index into sites_ + 1
  size_t table_size_ = 0;
  ByteSet read_[MSLC_MAX_BUFFERS], written_[MSLC_MAX_BUFFERS];
  ByteSet read_here_[MSLC_MAX_BUFFERS], written_here_[MSLC_MAX_BUFFERS];  // by this threadgroup
  uint64_t bytes_of_threadgroups_[MSLC_MAX_BUFFERS] = {};
  uint64_t counts_[MSLC_COUNT_KINDS] = {};
  uint64_t collective_lanes_ = 0;
};

// The sink of profiled launches.
void profile_access(Worker& worker, const Access& access);

}  // namespace mslc
