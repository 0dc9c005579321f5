/* The C side of the soft device; soft0/context.c documents it. */
#ifndef RDMAPOST_SOFT_H
#define RDMAPOST_SOFT_H

#include "libibverbs/shim.h"

#include <sys/timerfd.h>

#define RP_SOFT_MAX_SGE 32

/* The public struct has no handle. */
struct rp_soft_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t handle;
};

/* An extended CQ; `cq` comes first, because the header casts it to ibv_cq. */
struct rp_soft_cq_ex {
	struct ibv_cq_ex cq;
	struct ibv_wc wc; /* the current completion */
	struct ibv_wc_tm_info tm;
};

/* Set a zeroed context's operations; return its public part. */
struct ibv_context *rp_soft_context_init(struct verbs_context *whole);

/* Set the operations of an extended CQ that is zeroed except for the common part. */
void rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq);

/* Whether this thread is in the middle of a soft device verb. */
int rp_soft_busy(void);

#endif
