// Atomic access to words shared by threads or processes: loads acquire, stores release. A flag and its data are one
// word, for which relaxed accesses would suffice; but a slot may be overwritten once a line of another slot has arrived
// (common/ll.h), and acquire and release order these two accesses. On x86 they are free.
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

// Compare-and-swap. Returns whether the word held `expected` and now holds `value`.
template <class T>
bool compare_exchange(T& word, T expected, T value) {
  return std::atomic_ref<T>(word).compare_exchange_strong(expected, value, std::memory_order_acq_rel);
}

struct Memory {  // memory policy of ll::Session: a line is accessed by halves
  static ll::Line load(const ll::Line& line) { return {{host::load(line.half[0]), host::load(line.half[1])}}; }
  static void store(ll::Line& line, const ll::Line& value) {
    host::store(line.half[0], value.half[0]);
    host::store(line.half[1], value.half[1]);
  }
};

}  // namespace swiftspec::host
