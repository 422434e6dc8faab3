// Exchanges of any type between lanes, by words.
#pragma once

namespace mslc {

// Splits any type into 32-bit words, the unit of the hardware's exchanges.
template <class T>
struct Words {
  static constexpr uint count = (sizeof(T) + 3) / 4;
  uint word[count];
};

template <class T, class Exchange>
MSLC_INLINE T exchange_words(const T& value, Exchange exchange) {
  Words<T> words = {};
  __builtin_memcpy(&words, &value, sizeof(T));
  for (uint i = 0; i < Words<T>::count; ++i) words.word[i] = exchange(words.word[i]);
  T result;
  __builtin_memcpy(&result, &words, sizeof(T));
  return result;
}

}  // namespace mslc
