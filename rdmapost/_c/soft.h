/* The C side of the soft device; soft.c documents it. */
#ifndef RDMAPOST_SOFT_H
#define RDMAPOST_SOFT_H

#include "shim.h"

/* The data verbs of a context, as the provider defines them. */
struct rp_soft_ops {
	int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr,
			 struct ibv_send_wr **bad_wr);
	int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr,
			 struct ibv_recv_wr **bad_wr);
	int (*post_srq_recv)(struct ibv_srq *srq, struct ibv_recv_wr *wr,
			     struct ibv_recv_wr **bad_wr);
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

/* Make a context that calls `ops`; NULL with errno on failure. */
struct ibv_context *rp_soft_open(const struct rp_soft_ops *ops);

/* Free a context that rp_soft_open made. */
void rp_soft_close(struct ibv_context *context);

/* A timer as a file descriptor, not armed; -1 with errno on failure. */
int rp_timer_open(void);

/* Make the timer readable in `ns` nanoseconds; 0 disarms it. */
int rp_timer_set(int fd, int64_t ns);

#endif
