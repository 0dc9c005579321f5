"""Explanations of failed queries, which change nothing."""

from __future__ import annotations

from .model import Explanation, failure

QUERIES: tuple[Explanation, ...] = (
    failure(
        "get_device_list",
        "The devices could not be listed. Having none is not a failure: then the list is empty.",
        "rdmapost doctor. lsmod | grep ib_uverbs; ls /sys/class/infiniband_verbs.",
        causes=(
            "The kernel has no RDMA, or its modules are not loaded (ENOSYS): modprobe ib_uverbs, "
            "on the host.",
            "A container or a sandbox without /sys, or without permission (EPERM).",
            "The process is out of memory or of file descriptors (ENOMEM, EMFILE).",
        ),
    ),
    failure(
        "query_device_ex",
        "The device's attributes could not be queried.",
        "ibv_devinfo -v, which makes the same query; dmesg for the driver.",
        causes=(
            "The device was reset or removed after the program had opened it (EIO, ENODEV).",
            "libibverbs and the kernel's driver are not compatible (EINVAL, ENOSYS).",
        ),
    ),
    failure(
        "query_port",
        "The port could not be queried.",
        "rdmapost devices: the ports of each device.",
        causes=("The port number does not exist (-i).", "The device is lost: dmesg."),
    ),
    failure(
        "query_gid",
        "The GID could not be read.",
        "rdmapost devices: the GIDs, with their indexes.",
        causes=(
            "The index is empty or over the port's gid_tbl_len (ibv_*_pingpong -g, perftest -x).",
            "The network device has no address yet, or is in another network namespace.",
        ),
    ),
    failure(
        "query_pkey",
        "The P_Key could not be read.",
        "ibv_devinfo -v: max_pkeys, and the port's P_Keys.",
        causes=(
            "The index is not below the port's pkey_tbl_len. RoCE has one P_Key, at index 0.",
            "There is no port with this number.",
        ),
    ),
    failure(
        "get_pkey_index",
        "The port has no such P_Key.",
        "/sys/class/infiniband/NAME/ports/PORT/pkeys.",
        causes=(
            "InfiniBand: the subnet manager has not put this port into the partition.",
            "RoCE has only the default P_Key, 0xffff.",
            "The highest bit, full membership, differs: 0x8001 and 0x0001 are two P_Keys.",
        ),
    ),
    failure(
        "query_qp",
        "The queue pair's attributes could not be queried.",
        "dmesg: was the device reset? Was the queue pair destroyed before?",
        causes=("The device is lost, or the queue pair has been destroyed.",),
    ),
    failure(
        "query_qp_data_in_order",
        "libibverbs could not say whether data arrives in order. The answer 0 is not a failure: it "
        "means that nothing is guaranteed.",
        "The version of rdma-core: ibv_query_qp_data_in_order is newer than most verbs.",
        causes=("libibverbs does not have the call (EOPNOTSUPP).",),
    ),
    failure(
        "query_srq",
        "The shared receive queue's attributes could not be queried.",
        "dmesg, for a reset of the device.",
        causes=("The device is lost, or the SRQ has been destroyed.",),
    ),
    failure(
        "get_srq_num",
        "The SRQ has no number that a peer could send to.",
        "The type with which the SRQ was created.",
        causes=(
            "It is not an XRC SRQ; only these are addressed by number (EINVAL).",
            "The driver does not have XRC (EOPNOTSUPP).",
        ),
    ),
    failure(
        "query_rt_values_ex",
        "The device's clock could not be read.",
        "ibv_devinfo -v: hca_core_clock, or 'core clock not supported'.",
        causes=("The driver has no clock that programs may read (EOPNOTSUPP), as on Soft-RoCE.",),
    ),
    failure(
        "get_async_event",
        "No asynchronous event could be read.",
        "The errno; whether the context is still open and its file descriptor non-blocking.",
        causes=(
            "EAGAIN: async_fd is non-blocking, and there is no event; poll it first.",
            "EINTR: a signal came during the call; call again.",
            "EIO: the device has been removed; there will be no more events.",
        ),
    ),
)
