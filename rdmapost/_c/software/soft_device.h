/* The soft device's structs, and the functions that its Python code calls through cffi. */
#ifndef RDMAPOST_SOFT_DEVICE_H
#define RDMAPOST_SOFT_DEVICE_H

#include "libibverbs/shim.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>

/* The public struct has no handle. */
struct rp_soft_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t handle;
};

/* An extended CQ; `cq` comes first, because the header casts it to ibv_cq. */
struct rp_soft_cq_ex {
	struct ibv_cq_ex cq;
	struct ibv_wc wc; /* the current completion */
	struct rp_wc_ex more;
};

/* A queue pair with send_ops_flags. */
struct rp_soft_qp_ex {
	union {
		struct ibv_qp qp;
		struct rp_qp_ex ex;
	};
	struct ibv_send_wr *first, *last; /* being built */
	int code; /* an errno for ibv_wr_complete() */
};

/* Set a zeroed context's operations; return its public part. */
struct ibv_context *rp_soft_context_init(struct verbs_context *whole);

/* Set the operations of an extended CQ that is zeroed except for the common part. */
void rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq, uint64_t wc_flags);

/* Set the operations of a queue pair with send_ops_flags; return its public part. */
struct ibv_qp *rp_soft_qp_ex_init(struct rp_soft_qp_ex *qp);

#endif
