// A pause of a loop that waits for a store of another thread or process.
#pragma once

namespace swiftspec::host {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // most cores execute `yield` as a no-op, so the spin counts would be far too short
#endif
}

}  // namespace swiftspec::host
