// Words that several threads or processes share. Loads acquire and stores release: a flag and its data are one word and
// would need neither, but that a slot may be overwritten is known from another line having arrived (common/ll.h), and
// this orders the two. On x86 it costs nothing.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/ll.h"

namespace swiftspec::host {

template <class T>
T load(const T& word) {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}

template <class T>
void store(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

// Whether the word held `expected` and now holds `value`.
template <class T>
bool replace(T& word, T expected, T value) {
  return std::atomic_ref<T>(word).compare_exchange_strong(expected, value, std::memory_order_acq_rel);
}

struct Memory {  // of a Session: the halves of a line one by one
  static ll::Line load(const ll::Line& line) { return {{host::load(line.half[0]), host::load(line.half[1])}}; }
  static void store(ll::Line& line, const ll::Line& value) {
    host::store(line.half[0], value.half[0]);
    host::store(line.half[1], value.half[1]);
  }
};

}  // namespace swiftspec::host
