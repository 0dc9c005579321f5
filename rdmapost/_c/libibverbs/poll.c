/* Polling. */
#include "libibverbs/shim.h"

#include <string.h>

_Static_assert(sizeof(void *) == 8 && sizeof(unsigned long) == 8,
	       "rdmapost is for 64-bit machines");
_Static_assert(sizeof(struct ibv_wc) == 48, "struct ibv_wc has changed");
_Static_assert(sizeof(struct ibv_wc_tm_info) == 16, "struct ibv_wc_tm_info has changed");

/* Exactly one is not NULL. */
struct queue {
	struct ibv_cq *cq;
	struct ibv_cq_ex *cq_ex;
};

static void read_completion(struct ibv_cq_ex *cq, struct ibv_wc *wc, struct ibv_wc_tm_info *tm)
{
	memset(wc, 0, sizeof(*wc));
	memset(tm, 0, sizeof(*tm));
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
		ibv_wc_read_tm_info(cq, tm);
}

static int poll_once(struct queue from, int max, struct ibv_wc *wc, struct ibv_wc_tm_info *tm)
{
	struct ibv_poll_cq_attr attr = {0};
	int n = 0;
	int rc;

	if (from.cq)
		return ibv_poll_cq(from.cq, max, wc);
	rc = ibv_start_poll(from.cq_ex, &attr);
	if (rc)
		return rc == ENOENT ? 0 : -1;
	do {
		read_completion(from.cq_ex, wc + n, tm + n);
		n++;
	} while (n < max && !ibv_next_poll(from.cq_ex));
	ibv_end_poll(from.cq_ex);
	return n;
}

static int poll_until(struct queue from, struct ibv_wc *wc,
		      struct ibv_wc_tm_info *tm, int max, int min, int64_t spin_ns)
{
	int64_t end = 0;
	int got = 0;

	if (max < 1 || min > max) {
		errno = EINVAL;
		return -1;
	}
	for (;;) {
		int n = poll_once(from, max - got, wc + got, tm ? tm + got : NULL);

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

int rp_poll_cq(struct ibv_cq *cq, struct ibv_wc *wc, int max, int min, int64_t spin_ns)
{
	struct queue from = { .cq = cq };

	if (!cq || !wc) {
		errno = EINVAL;
		return -1;
	}
	return poll_until(from, wc, NULL, max, min, spin_ns);
}

int rp_poll_cq_ex(struct ibv_cq_ex *cq, struct ibv_wc *wc,
		  struct ibv_wc_tm_info *tm, int max, int min, int64_t spin_ns)
{
	struct queue from = { .cq_ex = cq };

	if (!cq || !wc || !tm) {
		errno = EINVAL;
		return -1;
	}
	return poll_until(from, wc, tm, max, min, spin_ns);
}
