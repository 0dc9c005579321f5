/* Polling a CQ, once or for a limited time: ibv_poll_cq, or an extended CQ's ibv_start_poll. */
#include "libibverbs/shim.h"

_Static_assert(sizeof(void *) == 8 && sizeof(unsigned long) == 8,
	       "rdmapost is for 64-bit machines");
_Static_assert(sizeof(struct ibv_wc) == 48, "struct ibv_wc has changed");
_Static_assert(sizeof(struct ibv_wc_tm_info) == 16, "struct ibv_wc_tm_info has changed");

static void read_completion(struct ibv_cq_ex *cq, struct ibv_wc *wc, struct rp_wc_ex *more)
{
	memset(wc, 0, sizeof(*wc));
	memset(more, 0, sizeof(*more));
	wc->wr_id = cq->wr_id;
	wc->status = cq->status;
	wc->qp_num = ibv_wc_read_qp_num(cq);
	if (wc->status != IBV_WC_SUCCESS) {
		/* Nothing else in a failed completion is valid. */
		wc->vendor_err = ibv_wc_read_vendor_err(cq);
		return;
	}
	wc->opcode = ibv_wc_read_opcode(cq);
	wc->wc_flags = ibv_wc_read_wc_flags(cq);
	wc->byte_len = ibv_wc_read_byte_len(cq);
	wc->imm_data = ibv_wc_read_imm_data(cq);
	wc->src_qp = ibv_wc_read_src_qp(cq);
	wc->slid = (uint16_t)ibv_wc_read_slid(cq);
	wc->sl = ibv_wc_read_sl(cq);
	wc->dlid_path_bits = ibv_wc_read_dlid_path_bits(cq);
	if (cq->read_tm_info)
		ibv_wc_read_tm_info(cq, &more->tm);
	if (cq->read_completion_ts)
		more->completion_ts = ibv_wc_read_completion_ts(cq);
	if (cq->read_completion_wallclock_ns)
		more->completion_wallclock_ns = ibv_wc_read_completion_wallclock_ns(cq);
	if (cq->read_flow_tag)
		more->flow_tag = ibv_wc_read_flow_tag(cq);
	if (cq->read_cvlan)
		more->cvlan = ibv_wc_read_cvlan(cq);
}

static int poll_once(struct ibv_cq *cq, int max, struct ibv_wc *wc, struct rp_wc_ex *more)
{
	struct ibv_cq_ex *extended = (struct ibv_cq_ex *)cq;
	struct ibv_poll_cq_attr attr = {0};
	int n;

	if (!more)
		return ibv_poll_cq(cq, max, wc);
	/*
	 * Poll each completion separately: when rxe's ibv_next_poll has found none, its
	 * ibv_end_poll skips an entry (rdma-core pull request 1512), and in older releases also
	 * unlocks the CQ a second time.
	 */
	for (n = 0; n < max; n++) {
		int rc = ibv_start_poll(extended, &attr);

		if (rc)
			return n || rc == ENOENT ? n : -1;
		read_completion(extended, wc + n, more + n);
		ibv_end_poll(extended);
	}
	return n;
}

int rp_poll_cq(struct ibv_cq *cq, struct ibv_wc *wc, struct rp_wc_ex *more, int max, int min,
	       int64_t spin_ns)
{
	int64_t end = 0;
	int got = 0;

	if (!cq || !wc || max < 1 || min > max) {
		errno = EINVAL;
		return -1;
	}
	for (;;) {
		int n = poll_once(cq, max - got, wc + got, more ? more + got : NULL);

		if (n < 0 || n > max - got) {
			/* Do not lose the completions polled before the failure. */
			if (got)
				return got;
			errno = EIO;
			return -1;
		}
		got += n;
		if (got >= min || spin_ns <= 0)
			return got;
		if (!end)
			end = rp_now_ns() + spin_ns;
		else if (rp_now_ns() >= end)
			return got;
	}
}
