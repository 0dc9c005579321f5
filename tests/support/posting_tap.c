/*
 * Intercepts a context's posting calls: passes each chain to a test before the device
 * receives it, and refuses work requests as the test specifies.  Also calls a test in
 * the middle of each poll, and has completion queues that return to each poll what the
 * test specifies.
 */
#include <errno.h>
#include <stdint.h>

#include <infiniband/verbs.h>

enum { SEND, RECV, SRQ_RECV, SRQ_OPS };

/* The result of a post; if all zero, the chain goes to the device. */
struct answer {
	int refuse; /* whether to refuse all after the first `passed` */
	uint32_t passed; /* how many go to the device */
	int rc; /* the return value: an errno, a negative one, or 0 */
	int bad; /* *bad: NULL (0), unchanged (1), the first refused (2), an invalid address (3) */
};

typedef void see(int verb, const void *first, struct answer *answer);
typedef int see_poll(int count, struct ibv_wc *wc);

static see *seen;
static see_poll *poll_seen; /* NULL if the test is not interested */
static struct ibv_context_ops device;
static int (*device_ops)(struct ibv_srq *srq, struct ibv_ops_wr *op,
			 struct ibv_ops_wr **bad);

void tap_open(struct ibv_context *context, see *with);
void tap_polled(see_poll *with);
void tap_close(struct ibv_context *context);

#define STAND_IN(name, verb, queue, type, original)                           \
	static int name(struct queue *object, struct type *wr,                \
			struct type **bad)                                    \
	{                                                                     \
		struct answer answer = { 0 };                                 \
		struct type *last = NULL, *at = wr;                           \
		int rc = 0;                                                   \
		seen(verb, wr, &answer);                                      \
		if (!answer.refuse)                                           \
			return original(object, wr, bad);                     \
		for (uint32_t i = answer.passed; i && at; i--) {              \
			last = at;                                            \
			at = at->next;                                        \
		}                                                             \
		if (last) {                                                   \
			last->next = NULL;                                    \
			rc = original(object, wr, bad);                       \
			last->next = at;                                      \
		}                                                             \
		if (rc)                                                       \
			return rc;                                            \
		if (answer.bad != 1)                                          \
			*bad = answer.bad == 0 ? NULL : answer.bad == 2 ? at :\
			       (struct type *)(uintptr_t)0x10;                \
		return answer.rc;                                             \
	}

STAND_IN(post_send, SEND, ibv_qp, ibv_send_wr, device.post_send)
STAND_IN(post_recv, RECV, ibv_qp, ibv_recv_wr, device.post_recv)
STAND_IN(post_srq_recv, SRQ_RECV, ibv_srq, ibv_recv_wr, device.post_srq_recv)
STAND_IN(post_srq_ops, SRQ_OPS, ibv_srq, ibv_ops_wr, device_ops)

static int seen_poll(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	int count = device.poll_cq(cq, num_entries, wc);

	return poll_seen ? poll_seen(count, wc) : count;
}

void tap_polled(see_poll *with)
{
	poll_seen = with;
}

void tap_open(struct ibv_context *context, see *with)
{
	seen = with;
	poll_seen = NULL;
	device = context->ops;
	device_ops = verbs_get_ctx(context)->post_srq_ops;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = seen_poll;
	verbs_get_ctx(context)->post_srq_ops = post_srq_ops;
}

void tap_close(struct ibv_context *context)
{
	context->ops.post_send = device.post_send;
	context->ops.post_recv = device.post_recv;
	context->ops.post_srq_recv = device.post_srq_recv;
	context->ops.poll_cq = device.poll_cq;
	verbs_get_ctx(context)->post_srq_ops = device_ops;
}

/* ---- a completion queue ------------------------------------------------------ */

enum { POLLS = 8 };

static struct {
	/* Completions that each poll returns, then 0; -1 to fail, -1 - n to fail behind n of them. */
	int count, answers[POLLS];
	int polls, asked[POLLS], ended; /* polls, how many each requested; calls to ibv_end_poll() */
	int left; /* completions left in this poll */
	int drained; /* whether that has just become 0: a poll that asks once more finds none */
	int fails; /* whether it then fails */
	uint64_t next; /* the next one's wr_id; odd ones have failed */
} script;

static struct ibv_context polled;

const int *tap_asked(void);
int tap_polls(void);
int tap_ended(void);
void *tap_cq(int extended, int reports_more, const int *answers, int count);

static int begin(int asked)
{
	int at = script.polls++, answer = at < script.count ? script.answers[at] : 0;

	if (at < POLLS)
		script.asked[at] = asked;
	script.fails = answer < -1;
	return script.left = script.fails ? -1 - answer : answer;
}

static enum ibv_wc_status status_of(uint64_t wr_id)
{
	return wr_id & 1 ? IBV_WC_REM_OP_ERR : IBV_WC_SUCCESS;
}

static int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	int answer = begin(num_entries);

	(void)cq;
	for (int i = 0; i < answer && i < num_entries; i++) {
		wc[i].wr_id = script.next++;
		wc[i].status = status_of(wc[i].wr_id);
	}
	return answer;
}

static int next_poll(struct ibv_cq_ex *cq)
{
	if (!script.left)
		return ENOENT;
	script.drained = !--script.left;
	cq->wr_id = script.next++;
	cq->status = status_of(cq->wr_id);
	return 0;
}

static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	if (script.drained) {
		script.drained = 0;
		return script.fails ? EBUSY : ENOENT;
	}
	if (!script.left && begin((int)attr->comp_mask) < 0)
		return EBUSY;
	return next_poll(cq);
}

static void end_poll(struct ibv_cq_ex *cq)
{
	(void)cq;
	script.ended++;
}

#define READ(type, field, number)                                             \
	static type read_##field(struct ibv_cq_ex *cq)                        \
	{                                                                     \
		return (type)(number + cq->wr_id);                            \
	}
READ(enum ibv_wc_opcode, opcode, 10)
READ(uint32_t, vendor_err, 20)
READ(uint32_t, byte_len, 30)
READ(uint32_t, imm_data, 40)
READ(uint32_t, qp_num, 50)
READ(uint32_t, src_qp, 60)
READ(unsigned int, wc_flags, 70)
READ(uint32_t, slid, 80)
READ(uint8_t, sl, 90)
READ(uint8_t, dlid_path_bits, 100)
READ(uint32_t, flow_tag, 150)
READ(uint16_t, cvlan, 160)

static void read_tm_info(struct ibv_cq_ex *cq, struct ibv_wc_tm_info *tm)
{
	tm->tag = 110 + cq->wr_id;
	tm->priv = (uint32_t)(120 + cq->wr_id);
}

static uint64_t read_completion_ts(struct ibv_cq_ex *cq)
{
	return 130 + cq->wr_id;
}

static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *cq)
{
	return 140 + cq->wr_id;
}

/* Only one can exist at a time. */
void *tap_cq(int extended, int reports_more, const int *answers, int count)
{
	static struct ibv_cq cq;
	static struct ibv_cq_ex ex;

	script.polls = script.ended = script.left = script.drained = 0;
	script.next = 0;
	script.count = count;
	for (int i = 0; i < count; i++)
		script.answers[i] = answers[i];
	polled.ops.poll_cq = poll_cq;
	cq.context = ex.context = &polled;
	ex.start_poll = start_poll;
	ex.next_poll = next_poll;
	ex.end_poll = end_poll;
	ex.read_opcode = read_opcode;
	ex.read_vendor_err = read_vendor_err;
	ex.read_byte_len = read_byte_len;
	ex.read_imm_data = read_imm_data;
	ex.read_qp_num = read_qp_num;
	ex.read_src_qp = read_src_qp;
	ex.read_wc_flags = read_wc_flags;
	ex.read_slid = read_slid;
	ex.read_sl = read_sl;
	ex.read_dlid_path_bits = read_dlid_path_bits;
	ex.read_tm_info = reports_more ? read_tm_info : NULL;
	ex.read_completion_ts = reports_more ? read_completion_ts : NULL;
	ex.read_completion_wallclock_ns = reports_more ? read_completion_wallclock_ns : NULL;
	ex.read_flow_tag = reports_more ? read_flow_tag : NULL;
	ex.read_cvlan = reports_more ? read_cvlan : NULL;
	return extended ? (void *)&ex : (void *)&cq;
}

const int *tap_asked(void)
{
	return script.asked;
}

int tap_polls(void)
{
	return script.polls;
}

int tap_ended(void)
{
	return script.ended;
}
