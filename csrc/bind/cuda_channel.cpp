// A group of GPUs that exchange lines: its ends, and gathering over it.
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "bind/cuda_arguments.h"
#include "bind/module.h"
#include "cuda/peers/channel.h"

namespace swiftspec::binding {

namespace {

using cuda::Channel;

std::unique_ptr<Channel> make_channel(int rank, const std::vector<uintptr_t>& inboxes, int64_t lines, uintptr_t epoch,
                                      uintptr_t done, uintptr_t trouble, double patience) {
  const int ranks = static_cast<int>(inboxes.size());
  check(ranks >= 1 && ranks <= cuda::kMaxPeers && rank >= 0 && rank < ranks, "1 to 8 ranks, 0 <= rank < size");
  check(patience > 0 && patience <= 3600, "patience must lie above 0 and be an hour at most");
  size_arg("lines", lines, 1);
  Channel channel{{ranks, 1, lines}, rank, static_cast<uint32_t>(patience * 1000) + 1, {}, nullptr, nullptr, nullptr};
  for (int r = 0; r < ranks; ++r) channel.inbox[r] = pointer_arg<ll::Line>("inbox", inboxes[r], 1);
  channel.epoch = pointer_arg<uint64_t>("epoch", epoch, 1);
  channel.done = pointer_arg<uint32_t>("done", done, 1);
  channel.trouble = pointer_arg<uint64_t>("trouble", trouble, 1);
  return std::make_unique<Channel>(channel);
}

int64_t inbox_bytes(int ranks, int64_t lines) {
  return ll::Layout{ranks, 1, lines}.inbox_lines(cuda::rules()) * static_cast<int64_t>(sizeof(ll::Line));
}

// Who gave up, on whom, in which slot and epoch; nobody: None.
py::object trouble_of(uint64_t word) {
  const ll::Trouble t = ll::trouble_of(word);
  if (t.reason == ll::Reason::kNone) return py::none();
  return py::make_tuple(int{t.rank}, int{t.source}, int{t.slot}, t.epoch);
}

cuda::GatherArgs gather_args(const Channel& channel, uintptr_t mine, uintptr_t out, int64_t count) {
  check(count >= 0 && cuda::word_lines(count) <= channel.layout.lines, "the message is longer than the group's lines");
  return {&channel, pointer_arg<const uint32_t>("mine", mine, count), pointer_arg<uint32_t>("out", out, count), count};
}

void gather(const Channel& channel, uintptr_t mine, uintptr_t out, int64_t count, uintptr_t stream) {
  cuda::gather(gather_args(channel, mine, out, count), stream_arg(stream));
}

void gather_virtual(const std::vector<const Channel*>& channels, const std::vector<uintptr_t>& mine,
                    const std::vector<uintptr_t>& out, int64_t count, uintptr_t stream) {
  const size_t ranks = channels.size();
  check(ranks >= 1 && ranks <= cuda::kMaxPeers && mine.size() == ranks && out.size() == ranks && count >= 1,
        "one of each for 1 to 8 ranks");
  std::vector<cuda::GatherArgs> args;
  for (size_t r = 0; r < ranks; ++r) {
    check(channels[r] != nullptr, "a rank without channel");
    args.push_back(gather_args(*channels[r], mine[r], out[r], count));
  }
  cuda::gather_virtual(args.data(), static_cast<int>(ranks), stream_arg(stream));
}

}  // namespace

void bind_cuda_channel(py::module_& m) {
  py::class_<Channel>(m, "CudaChannel",
                      "One rank's end of a group of GPUs; see cuda/peers/channel.h. Patience in seconds.")
      .def(py::init(&make_channel), py::arg("rank"), py::arg("inboxes"), py::arg("lines"), py::arg("epoch"),
           py::arg("done"), py::arg("trouble"), py::arg("patience"));
  m.def("cuda_inbox_bytes", &inbox_bytes, py::arg("ranks"), py::arg("lines"),
        "Bytes that a rank reads in, zero at first.");
  m.def("cuda_trouble", &trouble_of, py::arg("word"), "(rank, source, slot, epoch) of a wait that gave up, or None.");
  m.def("gather_cuda", &gather, py::arg("channel"), py::arg("mine"), py::arg("out"), py::arg("count"),
        py::arg("stream"), "See cuda::GatherArgs in kernels_cuda.h.");
  m.def("gather_cuda_virtual", &gather_virtual, py::arg("channels"), py::arg("mine"), py::arg("out"), py::arg("count"),
        py::arg("stream"), "All ranks of a group in one launch, for tests.");
}

}  // namespace swiftspec::binding
