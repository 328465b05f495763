#include "ascend/codes.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace tt::ascend {
namespace {

struct Entry {
  int code;
  const char* name;
  const char* cause;
  const char* next_step;
};

constexpr const char* kReadLog = "Read the first error in ~/ascend/log (or $ASCEND_PROCESS_LOG_PATH) of that rank";
constexpr const char* kReport = "This is a fault of the program: report it with the log of that rank";
constexpr const char* kVersions =
    "Run `torchtitan-npu doctor` and install the driver, firmware and CANN that belong together";
constexpr const char* kLessMemory =
    "Lower training.batch_size, turn on training.activation_checkpointing, or lower parallel.bucket_cap_mb; other "
    "processes on the card show in `npu-smi info`";
constexpr const char* kReplace =
    "Take this card out of the job (`npu-smi info -t health` shows which one) and start again from the last checkpoint";
constexpr const char* kPeers = "Read the logs of all ranks for the first error; start again from the last checkpoint";
constexpr const char* kNetwork =
    "Check that all nodes reach each other (`hccn_tool -i 0 -ping`), that every rank was started, and that no firewall "
    "is between; raise HCCL_CONNECT_TIMEOUT if nodes start slowly";

constexpr Entry kAclCodes[] = {
    {100000, "ACL_ERROR_INVALID_PARAM", "an argument is not valid", kReport},
    {100001, "ACL_ERROR_UNINITIALIZE", "AscendCL was used before aclInit", "Import torch_npu before using the card"},
    {100002, "ACL_ERROR_REPEAT_INITIALIZE", "aclInit was called twice",
     "Another library in the process initialises AscendCL itself: let torch_npu do it"},
    {107000, "ACL_ERROR_RT_PARAM_INVALID", "an argument of the runtime is not valid", kReport},
    {107001, "ACL_ERROR_RT_INVALID_DEVICEID", "there is no card of that number",
     "Use LOCAL_RANK, not RANK, for torch.npu.set_device, and check ASCEND_RT_VISIBLE_DEVICES"},
    {107002, "ACL_ERROR_RT_CONTEXT_NULL", "no card is set on this thread",
     "Call torch.npu.set_device(local_rank) first"},
    {107003, "ACL_ERROR_RT_STREAM_CONTEXT", "the stream belongs to another card",
     "Call torch.npu.set_device(local_rank) once, at the start, and do not change it"},
    {200000, "ACL_ERROR_BAD_ALLOC", "the host or the card has no memory left", kLessMemory},
    {200001, "ACL_ERROR_API_NOT_SUPPORT", "this CANN does not have the function", kVersions},
    {207001, "ACL_ERROR_RT_MEMORY_ALLOCATION", "the card has no memory left", kLessMemory},
    {300000, "ACL_ERROR_STORAGE_OVER_LIMIT", "a limit of the card is exceeded", kLessMemory},
    {500000, "ACL_ERROR_INTERNAL_ERROR", "an internal error of CANN", kReadLog},
    {500003, "ACL_ERROR_RT_FAILURE", "an internal error of the runtime", kReadLog},
    {507000, "ACL_ERROR_RT_INTERNAL_ERROR", "an internal error of the runtime", kReadLog},
    {507008, "ACL_ERROR_RT_SOC_VERSION", "CANN does not know this card", kVersions},
    {507011, "ACL_ERROR_RT_MODEL_EXECUTE", "an operator failed on the card", kReadLog},
    {507014, "ACL_ERROR_RT_AICORE_TIMEOUT", "an operator ran for too long on the card", kReadLog},
    {507015, "ACL_ERROR_RT_AICORE_EXCEPTION", "an operator failed on the card",
     "Run once with ASCEND_LAUNCH_BLOCKING=1: the stack then shows which operator"},
    {507018, "ACL_ERROR_RT_AICPU_EXCEPTION", "an operator failed on the card's own CPU",
     "Run once with ASCEND_LAUNCH_BLOCKING=1: the stack then shows which operator"},
    {507033, "ACL_ERROR_RT_DEV_SETUP_ERROR", "the card could not be started", kVersions},
    {507046, "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT", "the card did not finish in time",
     "A collective may wait for a rank that does not come: read the logs of all ranks"},
    {507048, "ACL_ERROR_RT_FFTS_PLUS_TIMEOUT",
     "a collective did not end on the card, as a rule because a peer died or did not come", kPeers},
    {507053, "ACL_ERROR_RT_DEVICE_MEM_ERROR", "the card's memory is faulty", kReplace},
    {507054, "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR", "the card's memory is faulty", kReplace},
    {507056, "ACL_ERROR_RT_LINK_ERROR", "a link between cards failed", kReplace},
    {507057, "ACL_ERROR_RT_SUSPECT_REMOTE_ERROR", "a peer's card failed, or its memory could not be read", kPeers},
    {507899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR", "an internal error of the driver", kVersions},
    {161001, "ACLNN_ERR_PARAM_NULLPTR", "an operator was called without a tensor that it needs", kReport},
    {161002, "ACLNN_ERR_PARAM_INVALID", "an operator does not take these shapes or dtypes", kReport},
    {361001, "ACLNN_ERR_RUNTIME_ERROR", "an operator could not be launched", kReadLog},
    {561003, "ACLNN_ERR_INNER_FIND_KERNEL_ERROR", "CANN has no kernel of that operator for this card",
     "Install the kernels (the `ops` package of CANN) for this card"},
};

constexpr Entry kHcclCodes[] = {
    {1, "HCCL_E_PARA", "an argument is not valid", kReport},
    {2, "HCCL_E_PTR", "a pointer is null", kReport},
    {3, "HCCL_E_MEMORY", "no memory for the communicator (it takes 2 x HCCL_BUFFSIZE MB of the card)", kLessMemory},
    {4, "HCCL_E_INTERNAL", "an internal error of HCCL", kReadLog},
    {5, "HCCL_E_NOT_SUPPORT", "this HCCL cannot do that", kVersions},
    {6, "HCCL_E_NOT_FOUND", "something that HCCL needs is missing", kVersions},
    {7, "HCCL_E_UNAVAIL", "a resource of HCCL is used up", kReadLog},
    {8, "HCCL_E_SYSCALL", "the operating system refused a call", kReadLog},
    {9, "HCCL_E_TIMEOUT", "a rank did not come in time", kNetwork},
    {11, "HCCL_E_TCP_CONNECT", "ranks could not connect to each other", kNetwork},
    {12, "HCCL_E_ROCE_CONNECT", "cards could not connect to each other", kNetwork},
    {13, "HCCL_E_TCP_TRANSFER", "a connection between ranks broke", kPeers},
    {14, "HCCL_E_ROCE_TRANSFER", "a connection between cards broke", kPeers},
    {15, "HCCL_E_RUNTIME", "the runtime of the card failed below HCCL",
     "If it is the first error of a run, the driver may not belong to this CANN: run `torchtitan-npu doctor`. Else "
     "an operator or a copy failed before: read the first error in the log of that rank"},
    {16, "HCCL_E_DRV", "the driver of the card failed below HCCL", kVersions},
    {19, "HCCL_E_NETWORK", "the network between the cards failed", kNetwork},
    {20, "HCCL_E_AGAIN", "HCCL asks to try again", kReadLog},
    {21, "HCCL_E_REMOTE", "a peer failed or is gone", kPeers},
    {22, "HCCL_E_SUSPENDING", "the communicator is suspended", kPeers},
    {23, "HCCL_E_OPRETRY_FAIL", "a collective was tried again and failed", kPeers},
    {24, "HCCL_E_OOM", "the card has no memory left for HCCL", kLessMemory},
};

std::string found(const Entry& entry) {
  return str(entry.name, " (", entry.code, "): ", entry.cause, ". ", entry.next_step);
}

}  // namespace

std::string explain(Source source, int code) {
  const auto* begin = source == Source::kAcl ? std::begin(kAclCodes) : std::begin(kHcclCodes);
  const auto* end = source == Source::kAcl ? std::end(kAclCodes) : std::end(kHcclCodes);
  const auto* entry = std::find_if(begin, end, [&](const Entry& e) { return e.code == code; });
  if (entry != end) {
    return found(*entry);
  }
  return str("code ", code, " of ", source == Source::kAcl ? "AscendCL" : "HCCL", ", which is not known here. ",
             kReadLog);
}

}  // namespace tt::ascend
