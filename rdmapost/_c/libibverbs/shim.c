/*
 * The shim: real symbols for six functions that the header defines as static inline, such as
 * ibv_post_send and ibv_poll_cq.
 *
 * Each calls the header's own inline, so only the header depends on the ABI of the context's ops
 * table. shim.h gives the six default visibility; everything else in the module is hidden.
 */
#include "libibverbs/shim.h"

int ibv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
		  struct ibv_send_wr **bad_wr)
{
	return header_ibv_post_send(qp, wr, bad_wr);
}

int ibv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr,
		  struct ibv_recv_wr **bad_wr)
{
	return header_ibv_post_recv(qp, wr, bad_wr);
}

int ibv_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
		      struct ibv_recv_wr **bad_wr)
{
	return header_ibv_post_srq_recv(srq, wr, bad_wr);
}

int ibv_post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op,
		     struct ibv_ops_wr **bad_op)
{
	return header_ibv_post_srq_ops(srq, op, bad_op);
}

int ibv_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	return header_ibv_poll_cq(cq, num_entries, wc);
}

int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	return header_ibv_req_notify_cq(cq, solicited_only);
}
