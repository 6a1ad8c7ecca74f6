// One registration function per header; module.cpp calls them all.
#pragma once
#include <nanobind/nanobind.h>

namespace jurybox {
void bind_tickets(nanobind::module_& m);
void bind_shm_rings(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
void bind_replay_pieces(nanobind::module_& m);
}  // namespace jurybox
