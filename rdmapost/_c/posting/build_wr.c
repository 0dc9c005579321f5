/*
 * Posting FLUSH and ATOMIC_WRITE with the ibv_wr_*() functions: ibv_post_send() cannot post them.
 */
#include "posting/build_wr.h"

#define AT(mine, theirs) \
	(offsetof(struct rp_built_wr, mine) == offsetof(struct ibv_send_wr, theirs))
_Static_assert(AT(next, next) && AT(sg_list, sg_list) && AT(num_sge, num_sge) &&
		       AT(opcode, opcode) && AT(send_flags, send_flags) && AT(imm_data, imm_data) &&
		       AT(remote_addr, wr.rdma.remote_addr) && AT(rkey, wr.rdma.rkey) &&
		       AT(remote_addr, wr.atomic.remote_addr) &&
		       AT(remote_srqn, qp_type.xrc.remote_srqn) &&
		       sizeof(struct rp_built_wr) <= sizeof(struct ibv_send_wr),
	       "struct rp_built_wr is not laid out like struct ibv_send_wr");

/* Either all of the work requests are posted, or none. */
static struct outcome build(struct rp_qp_ex *qp, const struct ibv_send_wr *wr, size_t count)
{
	struct ibv_qp_ex *ex = (void *)qp;
	int code;

	ibv_wr_start(ex);
	for (; wr; wr = wr->next) {
		const struct rp_built_wr *from = (const void *)wr;

		ex->wr_id = from->wr_id;
		ex->wr_flags = from->send_flags;
		if ((int)from->opcode == RP_WR_FLUSH)
			qp->wr_flush(ex, from->rkey, from->remote_addr, from->length,
				     (uint8_t)from->type, (uint8_t)from->level);
		else
			qp->wr_atomic_write(ex, from->rkey, from->remote_addr, &from->atomic_wr);
		if (ex->qp_base.qp_type == IBV_QPT_XRC_SEND)
			ibv_wr_set_xrc_srqn(ex, from->remote_srqn);
	}
	code = abs(ibv_wr_complete(ex));
	return (struct outcome){ code, code ? 0 : (int64_t)count };
}

struct outcome rp_build(void *qp, struct ibv_send_wr *wr)
{
	struct outcome all = { 0, 0 };

	/* Split the list into runs, posted by ibv_wr_*() and ibv_post_send() in turn. */
	while (wr && !all.code) {
		struct ibv_send_wr *last = wr, *rest;
		struct outcome run;
		size_t count = 1;

		for (; last->next && rp_is_built(last->next) == rp_is_built(wr); count++)
			last = last->next;
		rest = last->next;
		last->next = NULL;
		run = rp_is_built(wr) ? build(qp, wr, count) : rp_submit_chain(SEND, qp, wr, count);
		last->next = rest;
		all.code = run.code;
		all.posted = run.posted < 0 ? -1 : all.posted + run.posted;
		wr = rest;
	}
	return all;
}
