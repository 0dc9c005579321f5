/* The C side of the soft device; soft.c documents it. */
#ifndef RDMAPOST_SOFT_H
#define RDMAPOST_SOFT_H

#include "shim.h"

/*
 * Take the first of `count` records: work requests copied out of a chain, each
 * followed by its SGEs.  One whose SGEs cannot be copied comes last, with a
 * num_sge of -1.  Returns how many were taken, and, if that is not all, in the
 * high 32 bits the errno of the next.
 */
typedef int64_t rp_soft_take(uint32_t number, char *records, size_t size,
			     uint32_t count);

#define RP_SOFT_MAX_SGE 32

/* The data verbs of a context, as the provider defines them. */
struct rp_soft_ops {
	rp_soft_take *send; /* by qp_num */
	rp_soft_take *recv; /* by qp_num */
	rp_soft_take *srq_recv; /* by the SRQ's handle */
	int (*post_srq_ops)(struct ibv_srq *srq, struct ibv_ops_wr *op,
			    struct ibv_ops_wr **bad_op);
	int (*poll_cq)(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
	int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
};

/* The public struct has nothing that could name it. */
struct rp_soft_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t handle;
};

/*
 * Set by a callback that a Ctrl-C has struck: an exception raised there would
 * be lost, so the interrupt is delivered again when the callback is over.
 */
extern int rp_soft_interrupted;

/* Make a context that calls `ops`; NULL with errno on failure. */
struct ibv_context *rp_soft_open(const struct rp_soft_ops *ops);

/* Free a context that rp_soft_open made. */
void rp_soft_close(struct ibv_context *context);

/* Take up to `max` completions off a CQ; return their number, or -1. */
typedef int rp_soft_fill(struct ibv_cq *cq, int max, struct ibv_wc *wc,
			 struct ibv_wc_tm_info *tm);

/* An extended CQ; it stands first, because the header casts it to ibv_cq. */
struct rp_soft_cq_ex {
	struct ibv_cq_ex cq;
	rp_soft_fill *fill;
	int next;
	int count;
	struct ibv_wc wc[16];
	struct ibv_wc_tm_info tm[16];
};

/*
 * Let an extended CQ, all zero but for the common part, take its completions
 * from `fill`.  They are read out of a buffer, so that most steps of the
 * iterator need no call into Python.  Returns 0 or an errno.
 */
int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq, rp_soft_fill *fill);

/* A timer as a file descriptor, not armed; -1 with errno on failure. */
int rp_timer_open(void);

/* Make the timer readable in `ns` nanoseconds; 0 disarms it. */
int rp_timer_set(int fd, int64_t ns);

#endif
