// torch_npu looks names of libascendcl up here, and finds them in what this library depends on.
