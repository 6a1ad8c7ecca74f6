// jurybox.native: the parts that need atomics, futexes or memory bandwidth.
#include "bindings.hpp"

NB_MODULE(native, m) {
    // Threads keep such objects until the end of the process, where they are no leaks.
    nanobind::set_leak_warnings(false);
    m.doc() = "Jurybox's native core: shm rings, sequence-locked slots, replay ring, gather.";
    jurybox::bind_budget(m);
    jurybox::bind_tickets(m);
    jurybox::bind_shm_rings(m);
    jurybox::bind_grpc(m);
    jurybox::bind_grpc_client(m);
    jurybox::bind_weights(m);
    jurybox::bind_zmtp(m);
    jurybox::bind_relay_lane(m);
    jurybox::bind_pictures(m);
    jurybox::bind_replay(m);
    jurybox::bind_replay_archive(m);
}
