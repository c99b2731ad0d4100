#pragma once

#include <nanobind/nanobind.h>

// Adds the class Recordings to the module.
void bind_recordings(nanobind::module_& m);
