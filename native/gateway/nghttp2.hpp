// The system's libnghttp2 (HTTP/2 in C), loaded at run time: building needs neither its headers nor the library.
//
// Types, constants and signatures are from its documentation (nghttp2.org/documentation/apiref.html), as far as they are used
// here. They belong to libnghttp2.so.14, which has not changed them since 2013.
#pragma once
#include <dlfcn.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace jurybox::nghttp2 {

// ---- opaque types

struct Session;
struct Callbacks;
struct Option;

// ---- types of arguments

struct Field {  // nghttp2_nv; the library copies both texts
    std::uint8_t* name;
    std::uint8_t* value;
    std::size_t name_size, value_size;
    std::uint8_t flags;
};
struct Setting {  // nghttp2_settings_entry
    std::int32_t id;
    std::uint32_t value;
};
struct FrameHead {  // nghttp2_frame_hd, with which the union nghttp2_frame begins
    std::size_t length;
    std::int32_t stream;
    std::uint8_t type, flags, reserved;
};
union Source {  // nghttp2_data_source
    int descriptor;
    void* pointer;
};
using ReadSource = ssize_t (*)(Session*, std::int32_t stream, std::uint8_t* to, std::size_t room, std::uint32_t* flags, Source*, void* user);
struct Provider {  // nghttp2_data_provider
    Source source;
    ReadSource read;
};
struct Info {  // nghttp2_info
    int age, number;
    const char *version, *protocol;
};

constexpr std::uint8_t kData = 0, kHeaders = 1, kReset = 3, kGoAway = 7;  // types of frames
constexpr std::uint8_t kNoFlags = 0, kEndStream = 1, kNoIndex = 1;        // the last of a Field
constexpr std::int32_t kEnablePush = 2, kMaxStreams = 3, kInitialWindow = 4, kMaxFrame = 5, kMaxHeaders = 6;  // settings
constexpr std::uint32_t kEof = 1, kNoEndStream = 2, kNoCopy = 4;                             // flags of a ReadSource
constexpr std::uint32_t kNoError = 0, kRefusedStream = 7, kCancel = 8, kCalm = 11;           // error codes
constexpr int kWouldBlock = -504, kDeferred = -508, kResetThis = -521, kPause = -526, kNoMemory = -901;

using OnFrame = int (*)(Session*, const FrameHead*, void* user);
using OnHeader = int (*)(Session*, const FrameHead*, const std::uint8_t* name, std::size_t, const std::uint8_t* value, std::size_t, std::uint8_t flags, void* user);
using OnData = int (*)(Session*, std::uint8_t flags, std::int32_t stream, const std::uint8_t* data, std::size_t, void* user);
using SendData = int (*)(Session*, const FrameHead*, const std::uint8_t* head, std::size_t size, Source*, void* user);  // head: 9 bytes
using OnClose = int (*)(Session*, std::int32_t stream, std::uint32_t why, void* user);

// X(name, result, parameters) for each function nghttp2_NAME. The last two options were added against CVE-2023-44487 (streams
// opened and reset without end) and CVE-2024-28182 (endless headers). Distributions backport them to older versions, so a
// library is new enough if it has both, whatever its version.
#define JURYBOX_NGHTTP2(X)                                                                                    \
    X(version, Info*, (int))                                                                                  \
    X(session_callbacks_new, int, (Callbacks**))                                                              \
    X(session_callbacks_del, void, (Callbacks*))                                                              \
    X(session_callbacks_set_on_begin_headers_callback, void, (Callbacks*, OnFrame))                           \
    X(session_callbacks_set_on_header_callback, void, (Callbacks*, OnHeader))                                 \
    X(session_callbacks_set_on_frame_recv_callback, void, (Callbacks*, OnFrame))                              \
    X(session_callbacks_set_on_frame_send_callback, void, (Callbacks*, OnFrame))                              \
    X(session_callbacks_set_on_data_chunk_recv_callback, void, (Callbacks*, OnData))                          \
    X(session_callbacks_set_send_data_callback, void, (Callbacks*, SendData))                                 \
    X(session_callbacks_set_on_stream_close_callback, void, (Callbacks*, OnClose))                            \
    X(option_new, int, (Option**))                                                                            \
    X(option_del, void, (Option*))                                                                            \
    X(option_set_no_auto_window_update, void, (Option*, int))                                                 \
    X(option_set_no_closed_streams, void, (Option*, int))                                                     \
    X(option_set_stream_reset_rate_limit, void, (Option*, std::uint64_t burst, std::uint64_t rate))           \
    X(option_set_max_continuations, void, (Option*, std::size_t))                                             \
    X(session_server_new2, int, (Session**, const Callbacks*, void* user, const Option*))                     \
    X(session_client_new, int, (Session**, const Callbacks*, void* user))                                     \
    X(session_del, void, (Session*))                                                                          \
    X(session_mem_recv, ssize_t, (Session*, const std::uint8_t*, std::size_t))                                \
    X(session_mem_send, ssize_t, (Session*, const std::uint8_t**))                                            \
    X(session_want_read, int, (Session*))                                                                     \
    X(session_want_write, int, (Session*))                                                                    \
    X(session_set_local_window_size, int, (Session*, std::uint8_t flags, std::int32_t stream, std::int32_t))  \
    X(session_consume_connection, int, (Session*, std::size_t))                                               \
    X(session_consume_stream, int, (Session*, std::int32_t, std::size_t))                                     \
    X(session_resume_data, int, (Session*, std::int32_t))                                                     \
    X(session_get_last_proc_stream_id, std::int32_t, (Session*))                                              \
    X(session_get_stream_remote_close, int, (Session*, std::int32_t))                                         \
    X(submit_settings, int, (Session*, std::uint8_t flags, const Setting*, std::size_t))                      \
    X(submit_request, std::int32_t, (Session*, const void*, const Field*, std::size_t, const Provider*, void*)) \
    X(submit_response, int, (Session*, std::int32_t, const Field*, std::size_t, const Provider*))             \
    X(submit_trailer, int, (Session*, std::int32_t, const Field*, std::size_t))                               \
    X(submit_rst_stream, int, (Session*, std::uint8_t flags, std::int32_t, std::uint32_t why))                \
    X(submit_ping, int, (Session*, std::uint8_t flags, const std::uint8_t*))                                  \
    X(submit_goaway, int, (Session*, std::uint8_t flags, std::int32_t, std::uint32_t, const std::uint8_t*, std::size_t))

struct Library {
#define JURYBOX_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
    JURYBOX_NGHTTP2(JURYBOX_MEMBER)
#undef JURYBOX_MEMBER

    // The reason why it cannot be used; empty if it can.
    std::string missing;
};

// Return the library, which is loaded by the first call and never unloaded.
inline const Library& library() {
    static const Library loaded = [] {
        Library made;
        void* const found = ::dlopen("libnghttp2.so.14", RTLD_NOW | RTLD_LOCAL);
        if (!found) {
            made.missing = "no libnghttp2.so.14 is installed";
            return made;
        }
#define JURYBOX_LOAD(name, result, parameters)                                           \
    made.name = reinterpret_cast<result(*) parameters>(::dlsym(found, "nghttp2_" #name)); \
    if (!made.name && made.missing.empty()) made.missing = "libnghttp2.so.14 is too old: it has no nghttp2_" #name;
        JURYBOX_NGHTTP2(JURYBOX_LOAD)
#undef JURYBOX_LOAD
        return made;
    }();
    return loaded;
}

}  // namespace jurybox::nghttp2
