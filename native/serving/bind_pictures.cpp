#include <cstring>

#include "bindings.hpp"
#include "serving/pictures.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// The first fields of the two structures of the Arrow C data interface; the others belong to their owner.
struct ArrowSchema {
    const char* format;
    const char* name;
    const char* metadata;
    std::int64_t flags;
    std::int64_t n_children;
    ArrowSchema** children;
};

struct ArrowArray {
    std::int64_t length;
    std::int64_t null_count;
    std::int64_t offset;
    std::int64_t n_buffers;
    std::int64_t n_children;
    const void** buffers;
    ArrowArray** children;
};

// The contents of a capsule of the Arrow PyCapsule interface; its owner releases them with the capsule.
template <class T>
const T* held(nb::handle capsule, const char* name) {
    const void* pointer = PyCapsule_GetPointer(capsule.ptr(), name);
    if (pointer == nullptr) throw nb::python_error();
    return static_cast<const T*>(pointer);
}

// The bytes of `pixels` pixels of four bytes each; null if the array has other contents.
const std::uint8_t* pixels_of_four(const ArrowSchema& schema, const ArrowArray& array, std::int64_t pixels) {
    const auto is = [](const ArrowSchema& one, const char* format) {
        return one.format != nullptr && std::strcmp(one.format, format) == 0;
    };
    if (!is(schema, "+w:4") || schema.n_children != 1 || !is(*schema.children[0], "C")) return nullptr;
    if (array.length != pixels || array.offset != 0 || array.null_count != 0 || array.n_children != 1) return nullptr;
    const ArrowArray& bytes = *array.children[0];
    if (bytes.length != 4 * pixels || bytes.offset != 0 || bytes.null_count != 0 || bytes.n_buffers != 2) return nullptr;
    return static_cast<const std::uint8_t*>(bytes.buffers[1]);
}

}  // namespace

void bind_pictures(nb::module_& m) {
    m.def(
        "drop_fourth",
        [](nb::handle schema, nb::handle array, nb::handle pixels) {
            const Write out(pixels);
            if (out.item_bytes() != 1 || out.size() % 3) throw std::invalid_argument("expected uint8 (height, width, 3)");
            const std::size_t n = out.size() / 3;
            const std::uint8_t* from = pixels_of_four(
                *held<ArrowSchema>(schema, "arrow_schema"), *held<ArrowArray>(array, "arrow_array"), static_cast<std::int64_t>(n));
            if (from == nullptr) return false;
            const Unlocked others_go_on;
            drop_fourth(reinterpret_cast<std::uint8_t*>(out.bytes()), from, n);
            return true;
        },
        nb::arg("schema"), nb::arg("array"), nb::arg("pixels"),
        "Copy a picture of four bytes a pixel (capsules of Arrow's C interface, as Pillow's Image gives them for RGB) to "
        "uint8 (height, width, 3); False, and nothing was copied, where it is something else.");
    m.def(
        "base64_decoded",
        [](nb::str text) -> nb::object {
            Py_ssize_t size = 0;
            const char* given = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
            if (given == nullptr) {  // it contains surrogates
                PyErr_Clear();
                return nb::none();
            }
            const auto* digits = reinterpret_cast<const std::uint8_t*>(given);
            const std::size_t n = base64::decoded_size(digits, static_cast<std::size_t>(size));
            nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n)));
            if (!bytes.is_valid()) throw nb::python_error();
            auto* to = reinterpret_cast<std::uint8_t*>(PyBytes_AsString(bytes.ptr()));
            bool good = false;
            {
                const Unlocked others_go_on;
                good = base64::decode(to, digits, static_cast<std::size_t>(size));
            }
            return good ? bytes : nb::none();
        },
        nb::arg("text"), nb::sig("def base64_decoded(text: str) -> bytes | None"),
        "Decode padded base64; None if any character is invalid.");
    m.def(
        "json_cut",
        [](nb::bytes body, std::size_t least) -> nb::object {
            json::Cut found;
            bool good = false;
            {
                const Unlocked others_go_on;
                good = json::cut(body.c_str(), body.size(), least, found);
            }
            if (!good) return nb::none();
            nb::list texts;
            for (const auto& [start, size] : found.texts) texts.append(nb::str(body.c_str() + start, size));
            return nb::make_tuple(nb::bytes(found.rest.data(), found.rest.size()), texts);
        },
        nb::arg("body"), nb::arg("least"), nb::sig("def json_cut(body: bytes, least: int) -> tuple[bytes, list[str]] | None"),
        "Cut plain strings of at least so many bytes out of JSON in UTF-8: what is left, with NaN for each, and the strings in "
        "their order. None where it has constants that are no JSON, or is broken.");
}

}  // namespace jurybox
