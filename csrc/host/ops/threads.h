// A thread pool for parallel loops. Workers spin briefly after a job, since the next one usually follows soon, and then
// sleep.
#pragma once

#include <cstdint>

namespace swiftspec::host {

// Calls body(i) once for every i in [0, tasks), on the calling thread and on idle workers. Any thread may run any task,
// so no two tasks may write to the same memory. If another job is running, the caller executes all tasks itself.
void parallel_for(int64_t tasks, void (*body)(const void*, int64_t), const void* context);

template <class Body>
void parallel_for(int64_t tasks, const Body& body) {
  parallel_for(tasks, [](const void* it, int64_t task) { (*static_cast<const Body*>(it))(task); }, &body);
}

}  // namespace swiftspec::host
