// One binder per area of _C; module.cpp calls them. data_module.cpp is a module of its own.
#pragma once

#include <pybind11/pybind11.h>

void bind_plan(pybind11::module_& m);
void bind_host(pybind11::module_& m);
void bind_ascend(pybind11::module_& m);
void bind_c10d(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
