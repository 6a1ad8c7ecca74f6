// One registration function per header; module.cpp calls them all.
#pragma once
#include <nanobind/nanobind.h>

namespace jurybox {
void bind_memory(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
}  // namespace jurybox
