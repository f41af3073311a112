// A few threads that share the pieces of one job: they spin for a moment after it, since the next one follows
// soon, then sleep.
#pragma once

#include <cstdint>

namespace swiftspec::host {

// Calls body(i) once for every i below `pieces`, on this thread and on those of the process that are free.
// Any thread may take any piece, so no two pieces may write to the same memory. A job that comes while another
// runs is done by its caller alone.
void share(int64_t pieces, void (*body)(const void*, int64_t), const void* context);

template <class Body>
void share(int64_t pieces, const Body& body) {
  share(pieces, [](const void* it, int64_t piece) { (*static_cast<const Body*>(it))(piece); }, &body);
}

}  // namespace swiftspec::host
