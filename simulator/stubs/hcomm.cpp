// torch_npu looks HcclGroupStart and HcclGroupEnd up here: the library has libhccl as a dependency.
