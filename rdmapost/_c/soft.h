/* The C side of the soft device; soft.c documents it. */
#ifndef RDMAPOST_SOFT_H
#define RDMAPOST_SOFT_H

#include "shim.h"

#define RP_SOFT_MAX_SGE 32

/* The public struct has nothing that could name it. */
struct rp_soft_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t handle;
};

/* A context; `verbs` ends it, as the header expects. */
struct rp_soft_context {
	struct verbs_context verbs;
};

/* Give a context, all zero, its operations; 0 or an errno. */
int rp_soft_context_init(struct rp_soft_context *soft);
/* The part of it that its users see. */
struct ibv_context *rp_soft_context_of(struct rp_soft_context *soft);

/* Whether this thread is in the middle of a verb of the soft device. */
int rp_soft_busy(void);

/* An extended CQ; it stands first, because the header casts it to ibv_cq. */
struct rp_soft_cq_ex {
	struct ibv_cq_ex cq;
	struct ibv_wc wc; /* the completion that was reached last */
	struct ibv_wc_tm_info tm;
};

/* Give an extended CQ, all zero but for the common part, its operations; 0 or an errno. */
int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq);

/* Open a timer: a file descriptor, or -1 with an errno. */
int rp_timer_open(void);

/* Make a timer, which is a file descriptor, readable in `ns` nanoseconds; 0 disarms it. */
int rp_timer_set(int fd, int64_t ns);

#endif
