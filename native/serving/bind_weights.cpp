#include <nanobind/stl/tuple.h>

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "serving/weights_slots.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// Rows of WeightsPart: address, offset, bytes, width, mask.
using Parts = nb::ndarray<const std::uint64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

// The slots and their memory, which is kept alive; all accesses are checked to be within it.
class BoundSlots : public WeightsSlots {
public:
    BoundSlots(Bytes memory, std::size_t control, std::size_t data, std::size_t stride, std::size_t weights_bytes, unsigned slots)
        : WeightsSlots(memory.data() + control, reinterpret_cast<std::byte*>(memory.data()) + data, stride, weights_bytes, slots), memory_(std::move(memory)) {
        const std::size_t size = memory_.shape(0);
        if (slots != 1 && slots != 2) throw std::invalid_argument("a weights channel has one slot or two");
        if (control % 64 || data % 64 || stride % 64 || weights_bytes % 8) throw std::invalid_argument("slots must lie on cache lines");
        if (control > size || size - control < sizeof(WeightsControl) || data > size || weights_bytes > stride ||
            stride > (size - data) / slots)
            throw std::out_of_range("the slots end behind the memory");
    }

    // Map every page now; otherwise the first publication causes a page fault for every 4 KiB.
    void prefault() {
        Unlocked unlocked;
        constexpr int populate_write = 23;  // MADV_POPULATE_WRITE; refused by Linux before 5.14, which then faults later
        static_cast<void>(madvise(memory_.data(), memory_.shape(0), populate_write));
    }

    void commit(unsigned slot, std::uint64_t version, nb::bytes extra) {
        check_slot(slot), check_version(version), check_extra(extra);
        WeightsSlots::commit(slot, version, data_of(extra), extra.size());
    }

    std::int64_t publish(Parts parts, nb::bytes extra, std::uint64_t version, bool check) {
        check_parts(parts), check_version(version), check_extra(extra);
        Unlocked unlocked;
        return WeightsSlots::publish(rows(parts), parts.shape(0), data_of(extra), extra.size(), version, check);
    }

    using Read = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

    Read read(Parts parts, Bytes extra, double seconds, bool verify) const {
        check_parts(parts);
        if (extra.shape(0) < extra_room()) throw std::out_of_range("the buffer for the extra is smaller than the channel's room for it");
        std::uint64_t tries = 0;
        WeightsClaim claim;
        {
            Unlocked unlocked;
            claim = WeightsSlots::read(rows(parts), parts.shape(0), reinterpret_cast<std::byte*>(extra.data()), deadline(seconds), verify, tries);
        }
        if (claim.damaged) return {0, 0, 0, 0};
        return {claim.version, claim.extra_bytes, claim.published_ns, tries};
    }

    bool wait_newer(std::uint64_t seen, double seconds) const {
        Unlocked unlocked;
        return WeightsSlots::wait_newer(seen, deadline(seconds));
    }

private:
    static const WeightsPart* rows(const Parts& parts) { return reinterpret_cast<const WeightsPart*>(parts.data()); }
    static const std::byte* data_of(const nb::bytes& bytes) { return reinterpret_cast<const std::byte*>(bytes.c_str()); }
    static std::int64_t deadline(double seconds) {
        constexpr double longest = 3600;  // callers wait in slices
        return monotonic_ns() + static_cast<std::int64_t>(std::clamp(seconds, 0.0, longest) * 1e9);
    }

    void check_slot(unsigned slot) const {
        if (slot >= slots_) throw std::out_of_range("no such slot");
    }
    void check_version(std::uint64_t version) const {
        if (version <= newest() || version > std::numeric_limits<std::uint64_t>::max() / 2)
            throw std::invalid_argument("versions only grow");
    }
    void check_extra(const nb::bytes& extra) const {
        if (extra.size() > extra_room()) throw std::out_of_range("the extra is larger than the channel's room for it");
    }
    void check_parts(const Parts& parts) const {
        const WeightsPart* part = rows(parts);
        for (std::size_t i = 0; i < parts.shape(0); ++i)
            if (part[i].offset % 8 || part[i].offset > weights_bytes_ || part[i].bytes > weights_bytes_ - part[i].offset ||
                (part[i].bytes && !part[i].address))
                throw std::out_of_range("a part lies outside of the slot");
    }

    Bytes memory_;
};

}  // namespace

void bind_weights(nb::module_& m) {
    nb::class_<WeightsClaim>(m, "WeightsClaim", "The newest slot at the time of the call; version 0: nothing can be read.")
        .def_ro("version", &WeightsClaim::version)
        .def_ro("slot", &WeightsClaim::slot)
        .def_ro("extra_bytes", &WeightsClaim::extra_bytes)
        .def_ro("published_ns", &WeightsClaim::published_ns);
    nb::class_<BoundSlots>(m, "WeightsSlots", "Slots of weights with sequence counters in borrowed memory.")
        .def(nb::init<Bytes, std::size_t, std::size_t, std::size_t, std::size_t, unsigned>(), nb::arg("memory"), nb::arg("control"),
             nb::arg("data"), nb::arg("stride"), nb::arg("weights_bytes"), nb::arg("slots"))
        .def("prefault", &BoundSlots::prefault, "Map every page now, so that copies cause no page faults.")
        .def_prop_ro("newest", &BoundSlots::newest, "The newest version; 0: none yet.")
        .def("take_over", &BoundSlots::take_over, "Start as the only publisher; returns the newest version.")
        .def("begin", &BoundSlots::begin, "Mark the next slot as being written; returns its number.")
        .def("commit", &BoundSlots::commit, nb::arg("slot"), nb::arg("version"), nb::arg("extra"),
             "Announce the slot that was begun and filled as this version.")
        .def("publish", &BoundSlots::publish, nb::arg("parts"), nb::arg("extra"), nb::arg("version"), nb::arg("check"),
             "Copy parts (n, 5) uint64 (address, offset, bytes, width, mask) and announce them as this version; returns -1, or the "
             "number of the first part with NaN or infinity, if that is to be checked, and then publishes nothing.")
        .def("read", &BoundSlots::read, nb::arg("parts"), nb::arg("extra"), nb::arg("seconds"), nb::arg("verify") = true,
             "Copy the newest version out to parts (n, 5) uint64; returns version (0: not within these seconds), bytes of extra, "
             "CLOCK_MONOTONIC ns of the publication, and tries (0: the memory is damaged).")
        .def("wait_newer", &BoundSlots::wait_newer, nb::arg("seen"), nb::arg("seconds"),
             "Wait until there is a version newer than `seen`; False if there is none after this many seconds.")
        .def("claim", &BoundSlots::claim, "Return the newest slot, to copy it.")
        .def("holds", &BoundSlots::holds, nb::arg("claim"), "Whether a copy made since `claim` is of the claimed version.");
}

}  // namespace jurybox
