// Bindings of peer memory between the GPUs of one machine, and of all-gather over it.
#include <pybind11/stl.h>

#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/cuda_arguments.h"
#include "bind/module.h"
#include "cuda/device/device.h"
#include "cuda/peers/channel.h"
#include "cuda/peers/peers.h"
#include "host/shm/segment.h"

namespace swiftspec::binding {

namespace {

using cuda::Channel;

constexpr int64_t kWordBytes = 4;  // unit of the length of a message

constexpr int64_t kErrorWordBytes = 2 * sizeof(uint64_t);  // the fault, the time limit

// Shared memory that the hosts and GPUs of all ranks can access; see Channel::error_word.
class ErrorWord {
 public:
  ErrorWord(const std::string& name, int rank, int size, double seconds)
      : segment_(name, rank, size, kErrorWordBytes, seconds, {false, &interrupted}),
        pinned_(segment_.data(), kErrorWordBytes) {}
  py::memoryview view() { return py::memoryview::from_memory(segment_.data(), kErrorWordBytes); }

 private:
  host::Segment segment_;
  cuda::PinnedMemory pinned_;
};

std::unique_ptr<ErrorWord> make_error_word(const std::string& name, int rank, int size, double seconds) {
  check(size >= 1 && size <= ll::kMaxRanks && rank >= 0 && rank < size, "1 to 16 ranks, 0 <= rank < size");
  py::gil_scoped_release unlocked;
  return std::make_unique<ErrorWord>(name, rank, size, seconds);
}

std::unique_ptr<cuda::Inbox> make_inbox(int64_t bytes) {
  check(bytes >= 1, "an inbox has at least a byte");
  return std::make_unique<cuda::Inbox>(bytes);
}

py::bytes handle_of(const cuda::Inbox& inbox) {
  const cuda::PeerHandle handle = inbox.handle();
  return {handle.data(), handle.size()};
}

std::unique_ptr<cuda::PeerInbox> open_inbox(const std::string& handle) {
  cuda::PeerHandle wanted;
  check(handle.size() == wanted.size(), "a handle has 64 bytes");
  handle.copy(wanted.data(), wanted.size());
  return std::make_unique<cuda::PeerInbox>(wanted);
}

void check_range(int64_t offset, int64_t bytes) {
  check(offset >= 0 && bytes >= 1 && offset <= cuda::kAllocationBytes - bytes, "outside the first 2 MiB of an inbox");
}

py::bytes read_inbox(const cuda::Inbox& inbox, int64_t offset, int64_t bytes) {
  check_range(offset, bytes);
  return {inbox.read(offset, bytes)};
}

void write_inbox(cuda::PeerInbox& inbox, int64_t offset, const py::bytes& data) {
  const std::string bytes = data;
  check_range(offset, static_cast<int64_t>(bytes.size()));
  inbox.write(offset, bytes);
}

template <class T>
uintptr_t address_of(const T& memory) {
  return reinterpret_cast<uintptr_t>(memory.data());
}

// The inboxes are passed as addresses, since memory of other processes is not an array of this one.
std::unique_ptr<Channel> make_channel(int rank, const std::vector<uintptr_t>& inboxes, int64_t lines,
                                      const Array& epoch, const Array& done, const Array& error_word) {
  const int ranks = static_cast<int>(inboxes.size());
  check(ranks >= 1 && ranks <= cuda::kMaxPeers && rank >= 0 && rank < ranks, "1 to 8 ranks, 0 <= rank < size");
  size_arg("lines", lines, 1);
  Channel channel{{ranks, 1, lines}, rank, {}, nullptr, nullptr, nullptr};
  for (int r = 0; r < ranks; ++r) {
    check(inboxes[r] != 0, "an inbox is null");
    channel.inbox[r] = static_cast<ll::Line*>(aligned("an inbox", reinterpret_cast<void*>(inboxes[r])));
  }
  void* word = error_word.at<int64_t>(kCpu, "error_word", {2});
  const Device here = gpu();
  channel.epoch = reinterpret_cast<uint64_t*>(epoch.at<int64_t>(here, "epoch", {1}));
  channel.done = done.at<uint32_t>(here, "done", {1});
  channel.error_word = static_cast<uint64_t*>(cuda::device_pointer(word));
  return std::make_unique<Channel>(channel);
}

Channel two_shot(Channel channel) {
  channel.two_shot = true;
  return channel;
}

int64_t inbox_bytes(int ranks, int64_t lines) {
  return ll::Layout{ranks, 1, lines}.inbox_lines(cuda::protocol_params()) * static_cast<int64_t>(sizeof(ll::Line));
}

// The rank that aborted, the rank it waited for, slot and epoch; None without a fault.
std::optional<std::tuple<int, int, int, uint64_t>> decode_fault(uint64_t word) {
  const ll::Fault t = ll::decode_fault(word);
  if (t.reason == ll::Reason::kNone) return std::nullopt;
  return std::tuple<int, int, int, uint64_t>(t.rank, t.source, t.slot, t.epoch);
}

py::dict device() {
  const cuda::Device& here = cuda::device_info();
  py::dict out;
  out["arch"] = here.arch;
  out["shared"] = here.shared;
  out["half_shared"] = here.half_shared;
  out["l2"] = here.l2;
  out["at_once"] = std::vector<int>(std::begin(here.max_clusters), std::end(here.max_clusters));
  out["at_once_paired"] = std::vector<int>(std::begin(here.max_paired_clusters), std::end(here.max_paired_clusters));
  return out;
}

cuda::GatherArgs gather_args(const Channel& channel, const Array& mine, const Array& out) {
  const int64_t bytes = mine.bytes(), count = bytes / kWordBytes, ranks = channel.layout.ranks;
  check(bytes % kWordBytes == 0, "a message is of whole words of 4 bytes");
  check(out.count() == ranks * mine.count(), "out must hold every rank's message");
  const Device here = gpu();
  const Type type = mine.type();
  return {&channel, static_cast<const uint32_t*>(aligned("mine", mine.flat(type, here, "mine"), kWordBytes)),
          static_cast<uint32_t*>(aligned("out", out.flat(type, here, "out"), kWordBytes)), count};
}

void gather(const Channel& channel, const Array& mine, const Array& out, uintptr_t stream) {
  cuda::gather(gather_args(channel, mine, out), stream_arg(stream));
}

void gather_virtual(const std::vector<const Channel*>& channels, const std::vector<Array>& mine,
                    const std::vector<Array>& out, uintptr_t stream) {
  const size_t ranks = channels.size();
  check(ranks >= 1 && ranks <= cuda::kMaxPeers && mine.size() == ranks && out.size() == ranks,
        "one of each for 1 to 8 ranks");
  std::vector<cuda::GatherArgs> args;
  for (size_t r = 0; r < ranks; ++r) {
    check(channels[r] != nullptr, "a rank without channel");
    args.push_back(gather_args(*channels[r], mine[r], out[r]));
    check(args[r].count >= 1 && args[r].count == args[0].count, "messages of different lengths, or of none");
  }
  cuda::gather_virtual(args.data(), static_cast<int>(ranks), stream_arg(stream));
}

}  // namespace

void bind_cuda_peers(py::module_& m) {
  py::class_<cuda::Inbox>(m, "CudaInbox", "Zeroed memory of the current GPU that other processes can open.")
      .def(py::init(&make_inbox), py::arg("bytes"))
      .def_property_readonly("address", &address_of<cuda::Inbox>)
      .def("handle", &handle_of, "The IPC handle with which another process opens it.")
      .def("read", &read_inbox, py::arg("offset"), py::arg("bytes"), "Bytes of it, within the first 2 MiB.")
      .def("clear", &cuda::Inbox::clear, "Zeroes it.");
  py::class_<cuda::PeerInbox>(m, "CudaPeerInbox", "The inbox of another process, mapped for the current GPU.")
      .def(py::init([](const py::bytes& handle) { return open_inbox(handle); }), py::arg("handle"))
      .def_property_readonly("address", &address_of<cuda::PeerInbox>)
      .def("write", &write_inbox, py::arg("offset"), py::arg("data"), "Copies bytes into its first 2 MiB.");
  py::class_<ErrorWord>(m, "CudaWord", "16 bytes of shared memory that the ranks' hosts and GPUs see, zero at first.")
      .def(py::init(&make_error_word), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("seconds"))
      .def("view", &ErrorWord::view, "A view of the memory, valid as long as this object.");
  m.def("use_cuda_device", &cuda::use_device, py::arg("ordinal"),
        "Selects the GPU of this thread's next calls.");
  m.def("cuda_device", &device, "Properties of the current GPU; see cuda::Device in cuda/device/device.h.");
  m.def("cuda_bus_id", &cuda::bus_id, "The PCI bus id of the current GPU.");
  m.def("cuda_reaches", &cuda::can_access_peer, py::arg("bus_id"),
        "Whether the current GPU can access the memory of that one.");
  py::class_<Channel>(m, "CudaChannel",
                      "A rank's endpoint of a group of GPUs; see cuda/peers/channel.h.")
      .def(py::init(&make_channel), py::arg("rank"), py::arg("inboxes"), py::arg("lines"), py::arg("epoch"),
           py::arg("done"), py::arg("error_word"), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
           py::keep_alive<1, 7>(),
           "`inboxes`: the addresses at which this rank sees every rank's. On the GPU `epoch` [1] int64 and `done` [1] "
           "int32, `error_word` [2] int64 in pinned memory: the fault, and "
           "the milliseconds after which a waiting kernel aborts.")
      .def("two_shot", &two_shot, py::keep_alive<0, 1>(), "The same endpoint with two-shot sums.");
  m.def("cuda_inbox_bytes", &inbox_bytes, py::arg("ranks"), py::arg("lines"),
        "Size of the inbox of a rank, which must be zeroed.");
  m.def("cuda_decode_fault", &decode_fault, py::arg("word"),
        "(rank, source, slot, epoch) of a wait that timed out, or None.");
  m.def("gather_cuda", &gather, py::arg("channel"), py::arg("mine"), py::arg("out"), py::arg("stream"),
        "Gathers the arrays of all ranks, in rank order; see cuda::GatherArgs in kernels_cuda.h.");
  m.def("gather_cuda_virtual", &gather_virtual, py::arg("channels"), py::arg("mine"), py::arg("out"), py::arg("stream"),
        "All ranks of a group in one launch, for tests.");
}

}  // namespace swiftspec::binding
