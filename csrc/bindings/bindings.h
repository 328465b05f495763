// One binder per area; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

void bind_plan(pybind11::module_& m);
void bind_host(pybind11::module_& m);
void bind_ascend(pybind11::module_& m);
void bind_c10d(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
void bind_data(pybind11::module_& m);
