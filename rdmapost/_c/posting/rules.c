/*
 * The rules of a post: what ibv_post_send(3), ibv_post_recv(3), ibv_bind_mw(3) and
 * ibv_post_srq_ops(3) require of a work request and its queue.
 *
 * Each rule has a name; its message is in rdmapost/posting/rules.py. Everything here works on
 * numbers already read and structs held open, and runs no Python code. If the caller has turned
 * checks off, only what could harm the process is refused.
 */
#include "posting/rules.h"

#include "posting/inline_buffer.h"
#include "posting/tag_handle.h"

static const struct ibv_send_wr *send_wr(const struct post *post, const struct request *r)
{
	return (const void *)(post->structs + r->at);
}

/* ---- refusing: always 0 -------------------------------------------------- */

static int refuse_with(struct post *post, const char *rule, uint64_t a, uint64_t b)
{
	rp_refuse(post, rule, a);
	post->refusal.b = b;
	return 0;
}

static int refuse_for(struct post *post, const char *rule, void *object)
{
	rp_refuse(post, rule, 0);
	post->refusal.value = object;
	return 0;
}

/* ---- SGEs ---------------------------------------------------------------- */

static int is_region(PyObject *owner)
{
	return !rp_has_type(owner, rp_known.buffer);
}

static struct ibv_mr *mr_of(PyObject *owner)
{
	return ((struct rp_handle *)owner)->address;
}

static int has_access(PyObject *mr, unsigned int access)
{
	return (((struct rp_handle *)mr)->access & access) != 0;
}

uint64_t rp_start_and_length(PyObject *owner, uint64_t *length)
{
	if (!is_region(owner))
		return rp_buffer_start(owner, length);
	*length = mr_of(owner)->length;
	return ((struct rp_handle *)owner)->start;
}

/* Whether a range is within its owner. Compares differences, because sums could wrap. */
int rp_is_within(PyObject *owner, uint64_t addr, uint64_t length)
{
	uint64_t size, start = rp_start_and_length(owner, &size);

	return addr >= start && addr - start <= size && length <= size - (addr - start);
}

static int no_outside(struct post *post, PyObject *owner, const struct ibv_sge *sge)
{
	refuse_for(post, "outside_region", owner);
	post->refusal.sge = *sge;
	return 0;
}

/* INLINE data is read in this process: check its address. */
static int check_place(struct post *post, PyObject *owner, const struct ibv_sge *sge)
{
	if (is_region(owner) && has_access(owner, IBV_ACCESS_ZERO_BASED))
		return rp_refuse(post, "inline_zero_based", 0);
	if (is_region(owner) && ((struct rp_handle *)owner)->unreadable)
		return refuse_for(post, "inline_unreadable", owner);
	return rp_is_within(owner, sge->addr, sge->length) ? 1 : no_outside(post, owner, sge);
}

static inline int check_sge(const struct work_queue *q, struct post *post, PyObject *owner,
			    const struct ibv_sge *sge, int is_inline)
{
	if (is_inline) {
		if (owner == Py_None)
			return rp_refuse(post, "inline_numbers", 0);
		if (!check_place(post, owner, sge))
			return 0;
	} else if (owner != Py_None) {
		if (!is_region(owner))
			return rp_refuse(post, "not_registered", 0);
		if (mr_of(owner)->pd != q->pd)
			return refuse_for(post, "region_of_other_pd", owner);
		if (!rp_is_within(owner, sge->addr, sge->length))
			return no_outside(post, owner, sge);
	}
	return sge->length ? 1 : rp_refuse(post, "length_0", 0);
}

/* Check all SGEs; returns their total length, or -1 if one is refused. */
static int64_t check_sges(const struct work_queue *q, struct post *post, const struct request *r,
			  int is_inline)
{
	const struct ibv_sge *sge = rp_sges(post, r);
	PyObject *const *owners = post->owners + r->owners;
	int64_t total = 0;

	if (r->num_sge > q->max_sge)
		return rp_refuse(post, "too_many_sges", (uint64_t)r->num_sge) - 1;
	for (int i = 0; i < r->num_sge; i++) {
		total += sge[i].length;
		if (!check_sge(q, post, owners[i], sge + i, is_inline))
			return -1;
	}
	return total;
}

/* Check that the device may write to the SGEs. */
static int check_writable(struct post *post, const struct request *r)
{
	for (int i = 0; i < r->num_sge; i++) {
		PyObject *owner = post->owners[r->owners + (size_t)i];

		if (owner != Py_None && is_region(owner) &&
		    !has_access(owner, IBV_ACCESS_LOCAL_WRITE))
			return refuse_for(post, "not_writable", owner);
	}
	return 1;
}

/* ---- sends --------------------------------------------------------------- */

#define MISALIGNED(number) ((number) % 8)
#define NO_FLUSH_TYPE(number) (!(number) || (number) > 3) /* IBV_FLUSH_GLOBAL, _PERSISTENT */
#define EXCEEDS_24_BITS(number) ((number) >> 24) /* QP and SRQ numbers have 24 */

const char *rp_rule_of_number(const struct work_queue *q, const struct wr_type *type,
			      const struct field *field, uint64_t number)
{
	if (!q->checked || q->verb != SEND)
		return NULL;
	if (type->atomic && field->at == offsetof(struct ibv_send_wr, wr.atomic.remote_addr))
		return MISALIGNED(number) ? "misaligned" : NULL;
	if (type->opcode == IBV_WR_TSO && field->at == offsetof(struct ibv_send_wr, tso.mss))
		return number ? NULL : "mss";
	if (type->opcode == RP_WR_FLUSH && field->at == offsetof(struct rp_built_wr, type))
		return NO_FLUSH_TYPE(number) ? "no_flush_type" : NULL;
	if (type->opcode == RP_WR_FLUSH && field->at == offsetof(struct rp_built_wr, level))
		return number > 1 ? "no_flush_level" : NULL;
	if (q->datagram && field->at == offsetof(struct ibv_send_wr, wr.ud.remote_qpn))
		return EXCEEDS_24_BITS(number) ? "invalid_qp_number" : NULL;
	if (q->xrc && field->at == offsetof(struct ibv_send_wr, qp_type.xrc.remote_srqn))
		return EXCEEDS_24_BITS(number) ? "invalid_srq_number" : NULL;
	return NULL;
}

static int check_atomic(struct post *post, const struct request *r)
{
	uint64_t remote_addr = send_wr(post, r)->wr.atomic.remote_addr;

	if (r->type->has_sges && (r->num_sge != 1 || rp_sges(post, r)->length != 8))
		return rp_refuse(post, "atomic_sge", 0);
	return !MISALIGNED(remote_addr) || rp_refuse(post, "misaligned", remote_addr);
}

static int check_flush(struct post *post, const struct request *r)
{
	const struct rp_built_wr *wr = (const void *)send_wr(post, r);

	if (NO_FLUSH_TYPE(wr->type))
		return rp_refuse(post, "no_flush_type", wr->type);
	return wr->level <= 1 || rp_refuse(post, "no_flush_level", wr->level);
}

static int check_datagram(const struct work_queue *q, struct post *post, const struct request *r)
{
	uint32_t qpn = send_wr(post, r)->wr.ud.remote_qpn;

	if (!r->ah)
		return rp_refuse(post, "no_address_handle", 0);
	if (((struct ibv_ah *)r->ah->address)->pd != q->pd)
		return refuse_for(post, "resource_of_other_pd", r->ah);
	return !EXCEEDS_24_BITS(qpn) || rp_refuse(post, "invalid_qp_number", qpn);
}

static int check_srq_number(struct post *post, const struct request *r)
{
	uint32_t srqn = send_wr(post, r)->qp_type.xrc.remote_srqn;

	return !EXCEEDS_24_BITS(srqn) || rp_refuse(post, "invalid_srq_number", srqn);
}

#define WINDOW_ACCESS                                                                           \
	((unsigned int)(IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |                      \
			IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED))

static int check_bind(const struct work_queue *q, struct post *post, const struct request *r)
{
	const struct ibv_mw_bind_info *info = &send_wr(post, r)->bind_mw.bind_info;
	uint32_t rkey = send_wr(post, r)->bind_mw.rkey;
	int type_1 = post->type_1;
	struct ibv_mw *mw;

	if (!r->mw || !r->mr)
		return rp_refuse(post, "bind_needs", 0);
	mw = r->mw->address;
	if (mw->type != (type_1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2))
		return refuse_for(post, type_1 ? "window_of_type_2" : "window_of_type_1", r->mw);
	if (mw->pd != q->pd)
		return refuse_for(post, "resource_of_other_pd", r->mw);
	if (mr_of((PyObject *)r->mr)->pd != q->pd)
		return refuse_for(post, "resource_of_other_pd", r->mr);
	if (!type_1 && (rkey ^ mw->rkey) & ~RP_KEY_BYTE) {
		refuse_for(post, "not_a_window_key", r->mw);
		post->refusal.a = rkey;
		return 0;
	}
	if (info->mw_access_flags & ~WINDOW_ACCESS)
		return rp_refuse(post, "not_window_access", info->mw_access_flags);
	/* Length 0 unbinds a type 1 window; some drivers still read mr, so it must be given. */
	if (type_1 && !info->length)
		return 1;
	if (!has_access((PyObject *)r->mr, IBV_ACCESS_MW_BIND))
		return refuse_for(post, "not_bindable", r->mr);
	if (!info->length)
		return refuse_for(post, "bind_of_nothing", r->mw);
	if (!rp_is_within((PyObject *)r->mr, info->addr, info->length)) {
		refuse_with(post, "bind_outside", info->addr, info->length);
		post->refusal.value = (PyObject *)r->mr;
		return 0;
	}
	return 1;
}

static int check_tso(const struct work_queue *q, struct post *post, const struct request *r)
{
	if (!send_wr(post, r)->tso.mss)
		return rp_refuse(post, "mss", 0);
	if (r->hdr_len > q->max_tso_header)
		return rp_refuse(post, "longer_than_max_tso_header", r->hdr_len);
	return 1;
}

static int check_flags(const struct work_queue *q, struct post *post, const struct request *r)
{
	size_t index = (size_t)(r->type - rp_wr_types);

	if (!q->takes[index])
		return rp_refuse(post, "wrong_opcode", 0);
	if (r->flags & ~(uint64_t)q->flags[index])
		return refuse_with(post, "wrong_flags", r->flags & ~(uint64_t)q->flags[index], r->flags);
	return 1;
}

static int check_send(const struct work_queue *q, struct post *post, const struct request *r)
{
	int is_inline = (r->flags & IBV_SEND_INLINE) != 0;
	int64_t total;

	if (!check_flags(q, post, r))
		return 0;
	if (r->type->opcode == IBV_WR_BIND_MW)
		return check_bind(q, post, r);
	total = check_sges(q, post, r, is_inline);
	if (total < 0)
		return 0;
	if (is_inline && (uint64_t)total > q->max_inline_data)
		return rp_refuse(post, "inline_too_long", (uint64_t)total);
	if ((uint64_t)total > q->max_msg_size && r->type->opcode != IBV_WR_TSO)
		return rp_refuse(post, "too_long", (uint64_t)total);
	if (r->type->writes && !check_writable(post, r))
		return 0;
	if (r->type->atomic && !check_atomic(post, r))
		return 0;
	if (r->type->opcode == RP_WR_FLUSH && !check_flush(post, r))
		return 0;
	if (q->datagram && !check_datagram(q, post, r))
		return 0;
	if (q->xrc && !check_srq_number(post, r))
		return 0;
	return r->type->opcode == IBV_WR_TSO ? check_tso(q, post, r) : 1;
}

/* Drivers assume that a resource belongs to their device. Its struct begins with its context. */
static int check_context(struct post *post, struct rp_handle *h, const struct rp_handle *owner)
{
	struct ibv_context **of = h ? h->address : NULL, **here = owner->address;

	return !of || *of == *here ? 1 : refuse_for(post, "resource_of_other_device", h);
}

_Static_assert(!offsetof(struct ibv_ah, context) && !offsetof(struct ibv_mw, context) &&
		       !offsetof(struct ibv_mr, context) && !offsetof(struct ibv_qp, context),
	       "a struct begins with something else");

/* The only rules that apply with checks off: they refuse what would harm the process or driver. */
static int check_unsafe(const struct work_queue *q, struct rp_handle *owner, struct post *post,
			const struct request *r)
{
	const struct ibv_sge *sge = rp_sges(post, r);
	uint64_t total = 0;

	if (post->type_1 && !q->binds)
		return rp_refuse(post, "wrong_opcode", 0);
	/* Drivers follow the address handle's pointer unchecked, whatever the opcode. */
	if (q->datagram && !r->ah)
		return rp_refuse(post, "no_address_handle", 0);
	/* A queue pair without send_ops_flags has no functions that post FLUSH or ATOMIC_WRITE. */
	if (!q->takes[r->type - rp_wr_types])
		return rp_refuse(post, "wrong_opcode", 0);
	if (r->type->opcode == IBV_WR_BIND_MW && (!r->mw || !r->mr))
		return rp_refuse(post, "bind_needs", 0);
	if (!check_context(post, r->ah, owner) || !check_context(post, r->mw, owner) ||
	    !check_context(post, r->mr, owner))
		return 0;
	if (!(r->flags & IBV_SEND_INLINE))
		return 1;
	for (int i = 0; i < r->num_sge; i++) {
		PyObject *in = post->owners[r->owners + (size_t)i];

		total += sge[i].length;
		if (in != Py_None && !check_place(post, in, sge + i))
			return 0;
	}
	/* Drivers compute the sum in 32 bits, and copy everything if it seems to fit. */
	return total <= UINT32_MAX ? 1 : rp_refuse(post, "inline_32_bits", total);
}

/* ---- receives and tag-matching operations -------------------------------- */

static int check_receive(const struct work_queue *q, struct post *post, const struct request *r)
{
	return check_sges(q, post, r, 0) >= 0 && check_writable(post, r);
}

/* Drivers index an array with the handle's number. */
static int check_tag_handle(const struct work_queue *q, struct post *post, const struct request *r)
{
	const struct rp_tag_handle *tag = (void *)r->tag;

	if (!tag || tag->list != q->in_flight->tagged)
		return rp_refuse(post, "no_tag_handle", 0);
	if (q->checked && !rp_is_outstanding(tag->list, tag->cookie, tag->serial))
		return refuse_for(post, "tag_not_listed", r->tag);
	return 1;
}

static int check_op(const struct work_queue *q, struct post *post, const struct request *r)
{
	const struct ibv_ops_wr *wr = (void *)(post->structs + r->at);
	uint64_t sync = r->flags & IBV_OPS_TM_SYNC;

	if (r->type->opcode == IBV_WR_TAG_DEL && q->max_num_tags && !check_tag_handle(q, post, r))
		return 0;
	if (!q->checked)
		return 1;
	if (r->flags & ~(uint64_t)(IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC))
		return rp_refuse(post, "wrong_ops_flags", r->flags);
	if (!sync && wr->tm.unexpected_cnt)
		return rp_refuse(post, "count_without_sync", wr->tm.unexpected_cnt);
	if (!sync && r->type->opcode == IBV_WR_TAG_SYNC)
		return rp_refuse(post, "sync_of_nothing", 0);
	if (r->type->opcode != IBV_WR_TAG_ADD)
		return 1;
	if (wr->tm.add.tag & ~wr->tm.add.mask)
		return refuse_with(post, "tag_outside_mask", wr->tm.add.tag, wr->tm.add.mask);
	return check_receive(q, post, r);
}

/* ---- all of them --------------------------------------------------------- */

static const char *why_unusable(const struct rp_handle *h)
{
	if (h->spoiled)
		return "spoiled";
	/* If it is open now, its registration has just ended in another thread. */
	if (h->remaking || rp_is_open(h))
		return "being_registered";
	/* Its struct continues to exist while the close can still be refused. */
	if (rp_is_here(h) && RP_LOAD(&h->address))
		return "being_closed";
	return "closed";
}

int rp_check(const struct work_queue *q, struct rp_handle *owner, struct post *post,
	     struct request *r)
{
	PyObject *closed = rp_pin_refs(r->refs, owner);

	r->pinned = 1;
	if (closed)
		return refuse_for(post, why_unusable((struct rp_handle *)closed), closed);
	return rp_check_again(q, owner, post, r);
}

int rp_check_again(const struct work_queue *q, struct rp_handle *owner, struct post *post,
		   struct request *r)
{
	if (q->verb == SRQ_OPS)
		return check_op(q, post, r);
	if (q->verb == SEND)
		return q->checked ? check_send(q, post, r) : check_unsafe(q, owner, post, r);
	return !q->checked || check_receive(q, post, r);
}
