// jurybox.native: what needs atomics, futexes or memory bandwidth, and nothing else.
#include "bindings.hpp"

NB_MODULE(native, m) {
    m.doc() = "Jurybox's native core: doorbell, sequence-locked slots, replay ring, gather.";
    jurybox::bind_memory(m);
    jurybox::bind_replay(m);
}
