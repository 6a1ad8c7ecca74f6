#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "replay/archive.hpp"
#include "replay/bind_ring.hpp"

namespace jurybox {
namespace {

using namespace replay;

using Words = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Runs = nb::ndarray<const std::uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Pieces = nb::ndarray<const std::uint64_t, nb::shape<-1, 6>, nb::c_contig, nb::device::cpu>;
using File = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

std::uint32_t checksum(nb::handle data) {
    const Read given(data);
    const Unlocked without;
    return crc32c(given.bytes(), given.size());
}

std::size_t snapshot_slots(PyRing& self, std::uint64_t first, Bytes out, std::uint64_t newest, std::optional<Bytes> links) {
    const Ring& ring = self.ring;
    const std::size_t n = out.shape(0) / ring.slot_bytes;
    if (first + n > ring.capacity) throw std::out_of_range("the slots end behind the ring");
    if (links && (ring.links == nullptr || links->shape(0) < 16 * n)) throw std::out_of_range("there are no links, or there is no room for them");
    const Unlocked without;
    return snapshot(ring, first, n, newest, reinterpret_cast<std::byte*>(out.data()), links ? reinterpret_cast<std::byte*>(links->data()) : nullptr);
}

std::pair<std::size_t, std::size_t> pack_slots(PyRing& self, Runs runs, std::uint32_t part, std::uint64_t newest, bool compressed, Bytes out, Words sequences) {
    std::size_t room = 0;
    for (std::size_t r = 0; r < runs.shape(0); ++r) {
        const std::uint64_t first = runs.data()[2 * r], slots = runs.data()[2 * r + 1];
        if (first > self.ring.capacity || slots > self.ring.capacity - first) throw std::out_of_range("the slots end behind the ring");
        room += sizeof(RecordHead) + slots * self.ring.slot_bytes;
    }
    if (out.shape(0) < room || sequences.shape(0) != self.ring.capacity) throw std::out_of_range("there is no room for the records, or for their words");
    const Unlocked without;
    const Packed packed =
        pack(self.ring, runs.data(), runs.shape(0), part, newest, compressed, reinterpret_cast<std::byte*>(out.data()), sequences.data());
    return {packed.bytes, packed.rows};
}

std::vector<int> bring_pieces(int fd, File file, Pieces pieces, Bytes memory, std::optional<int> fresh, bool keep) {
    const std::size_t n = pieces.shape(0);
    std::vector<int> found(n);
    const auto* all = reinterpret_cast<const Piece*>(pieces.data());
    for (std::size_t i = 0; i < n; ++i) {
        const Piece& piece = all[i];
        if (piece.codec > kLz4 || (piece.codec == kAsIs && piece.raw_bytes != piece.stored_bytes)) throw std::invalid_argument("a piece is coded otherwise");
        if (piece.target > memory.shape(0) || piece.raw_bytes > memory.shape(0) - piece.target || piece.offset > file.shape(0) ||
            piece.stored_bytes > file.shape(0) - piece.offset)
            throw std::out_of_range("a piece ends behind its file or its memory");
    }
    auto* to = reinterpret_cast<std::byte*>(memory.data());
    const Unlocked without;
    for (std::size_t i = 0; i < n; ++i) {
        found[i] = static_cast<int>(fresh ? bring_fresh(fd, file.data(), all[i], *fresh) : bring(fd, file.data(), all[i], to + all[i].target, keep));
    }
    return found;
}

// Ask the kernel to start writing a file's dirty pages, without waiting and without flushing the disk.
void start_writing(int fd) {
    int failed = 0;
    {
        const Unlocked without;
        failed = sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE) == 0 ? 0 : errno;
    }
    // File systems that do not support it write at the end, with fsync.
    if (failed != 0 && failed != ESPIPE && failed != ENOSYS && failed != EINVAL) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

}  // namespace

void bind_replay_archive(nb::module_& m) {
    m.def("crc32c", &checksum, nb::arg("data"), "CRC-32C of a contiguous buffer.");
    m.def("replay_snapshot", &snapshot_slots, nb::arg("ring"), nb::arg("first"), nb::arg("out"), nb::arg("newest"), nb::arg("links") = nb::none());
    m.def("replay_pack", &pack_slots, nb::arg("ring"), nb::arg("runs"), nb::arg("part"), nb::arg("newest"), nb::arg("compressed"), nb::arg("out"),
          nb::arg("sequences"), "Write records of runs of slots; returns (bytes, rows).");
    m.def("replay_bring", &bring_pieces, nb::arg("fd"), nb::arg("file"), nb::arg("pieces"), nb::arg("memory"), nb::arg("fresh").none(), nb::arg("keep"),
          "Read records to their places; returns for each 0 (valid), 1 (damaged), 2 (no memory) or 3 (unreadable).");
    m.def("start_writing", &start_writing, nb::arg("fd"));
}

}  // namespace jurybox
