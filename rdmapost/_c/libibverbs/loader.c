/*
 * libibverbs, loaded by dlopen at first use instead of linked.
 *
 * FUNCTIONS lists every exported function that we call: its result, name,
 * parameters, arguments, and the value returned if the library lacks it (with
 * errno set to EOPNOTSUPP). E marks functions that return an errno, V those that
 * return nothing. The list generates the table of pointers, and forwarders with
 * the functions' own names and hidden visibility, so that the header's inlines
 * and the generated binding link against them unchanged.
 *
 * dlsym gives the default version of each symbol; names that start with
 * IBVERBS_PRIVATE_ are never used.  The library stays open for the life of
 * the process: providers keep state in it.
 */
#include "libibverbs/shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

/* Header macros that hide exported functions. */
#undef ibv_query_port
#undef ibv_reg_mr

#define E(F, name, parameters, arguments) F(int, name, parameters, arguments, EOPNOTSUPP)
#define FUNCTIONS(F, V)                                                                           \
	F(struct ibv_device **, ibv_get_device_list, (int *n), (n), NULL)                         \
	F(__be64, ibv_get_device_guid, (struct ibv_device *d), (d), 0)                            \
	F(struct ibv_context *, ibv_open_device, (struct ibv_device *d), (d), NULL)               \
	E(F, ibv_close_device, (struct ibv_context *c), (c))                                      \
	F(int, ibv_get_async_event, (struct ibv_context *c, struct ibv_async_event *e), (c, e),   \
	  -1)                                                                                     \
	E(F, ibv_query_device, (struct ibv_context *c, struct ibv_device_attr *a), (c, a))        \
	E(F, ibv_query_port, (struct ibv_context *c, uint8_t p, struct _compat_ibv_port_attr *a), \
	  (c, p, a))                                                                              \
	F(int, ibv_query_gid, (struct ibv_context *c, uint8_t p, int i, union ibv_gid *g),        \
	  (c, p, i, g), -1)                                                                       \
	E(F, _ibv_query_gid_ex,                                                                   \
	  (struct ibv_context *c, uint32_t p, uint32_t i,                                         \
	   struct ibv_gid_entry *e, uint32_t f, size_t s), (c, p, i, e, f, s))                    \
	F(ssize_t, _ibv_query_gid_table,                                                          \
	  (struct ibv_context *c, struct ibv_gid_entry *e, size_t m, uint32_t f, size_t s),       \
	  (c, e, m, f, s), -EOPNOTSUPP)                                                           \
	F(int, ibv_query_pkey, (struct ibv_context *c, uint8_t p, int i, __be16 *k), (c, p, i, k), \
	  -1)                                                                                     \
	F(struct ibv_pd *, ibv_alloc_pd, (struct ibv_context *c), (c), NULL)                      \
	E(F, ibv_dealloc_pd, (struct ibv_pd *pd), (pd))                                           \
	F(struct ibv_mr *, ibv_reg_mr, (struct ibv_pd *pd, void *a, size_t l, int f),             \
	  (pd, a, l, f), NULL)                                                                    \
	F(struct ibv_mr *, ibv_reg_mr_iova2,                                                      \
	  (struct ibv_pd *pd, void *a, size_t l, uint64_t i, unsigned int f), (pd, a, l, i, f),   \
	  NULL)                                                                                   \
	F(struct ibv_mr *, ibv_reg_dmabuf_mr,                                                     \
	  (struct ibv_pd *pd, uint64_t o, size_t l, uint64_t i, int d, int f), (pd, o, l, i, d, f), \
	  NULL)                                                                                   \
	F(int, ibv_rereg_mr,                                                                      \
	  (struct ibv_mr *mr, int f, struct ibv_pd *pd, void *a, size_t l, int m),                \
	  (mr, f, pd, a, l, m), IBV_REREG_MR_ERR_INPUT)                                           \
	E(F, ibv_dereg_mr, (struct ibv_mr *mr), (mr))                                             \
	F(struct ibv_comp_channel *, ibv_create_comp_channel, (struct ibv_context *c), (c), NULL) \
	E(F, ibv_destroy_comp_channel, (struct ibv_comp_channel *ch), (ch))                       \
	F(struct ibv_cq *, ibv_create_cq,                                                         \
	  (struct ibv_context *c, int n, void *x, struct ibv_comp_channel *ch, int v),            \
	  (c, n, x, ch, v), NULL)                                                                 \
	E(F, ibv_resize_cq, (struct ibv_cq *cq, int n), (cq, n))                                  \
	E(F, ibv_destroy_cq, (struct ibv_cq *cq), (cq))                                           \
	F(int, ibv_get_cq_event, (struct ibv_comp_channel *ch, struct ibv_cq **cq, void **x),     \
	  (ch, cq, x), -1)                                                                        \
	F(struct ibv_srq *, ibv_create_srq, (struct ibv_pd *pd, struct ibv_srq_init_attr *a),     \
	  (pd, a), NULL)                                                                          \
	E(F, ibv_modify_srq, (struct ibv_srq *s, struct ibv_srq_attr *a, int m), (s, a, m))       \
	E(F, ibv_query_srq, (struct ibv_srq *s, struct ibv_srq_attr *a), (s, a))                  \
	E(F, ibv_destroy_srq, (struct ibv_srq *s), (s))                                           \
	F(struct ibv_qp *, ibv_create_qp, (struct ibv_pd *pd, struct ibv_qp_init_attr *a),        \
	  (pd, a), NULL)                                                                          \
	E(F, ibv_modify_qp, (struct ibv_qp *qp, struct ibv_qp_attr *a, int m), (qp, a, m))        \
	E(F, ibv_query_qp,                                                                        \
	  (struct ibv_qp *qp, struct ibv_qp_attr *a, int m, struct ibv_qp_init_attr *i),          \
	  (qp, a, m, i))                                                                          \
	F(int, ibv_query_qp_data_in_order,                                                        \
	  (struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t f), (qp, op, f), -1)                \
	E(F, ibv_destroy_qp, (struct ibv_qp *qp), (qp))                                           \
	F(struct ibv_ah *, ibv_create_ah, (struct ibv_pd *pd, struct ibv_ah_attr *a), (pd, a),    \
	  NULL)                                                                                   \
	E(F, ibv_destroy_ah, (struct ibv_ah *ah), (ah))                                           \
	F(int, ibv_init_ah_from_wc,                                                               \
	  (struct ibv_context *c, uint8_t p, struct ibv_wc *w, struct ibv_grh *g,                 \
	   struct ibv_ah_attr *a), (c, p, w, g, a), -1)                                           \
	E(F, ibv_attach_mcast, (struct ibv_qp *qp, const union ibv_gid *g, uint16_t l),           \
	  (qp, g, l))                                                                             \
	E(F, ibv_detach_mcast, (struct ibv_qp *qp, const union ibv_gid *g, uint16_t l),           \
	  (qp, g, l))                                                                             \
	V(ibv_free_device_list, (struct ibv_device **list), (list))                               \
	V(ibv_ack_async_event, (struct ibv_async_event *e), (e))                                  \
	V(ibv_ack_cq_events, (struct ibv_cq *cq, unsigned int n), (cq, n))

static struct {
#define POINTER(result, name, parameters, arguments, absent)                   \
	result(*name) parameters;
#define POINTER_VOID(name, parameters, arguments) void (*name) parameters;
	FUNCTIONS(POINTER, POINTER_VOID)
} table;

#define FORWARD(result, name, parameters, arguments, absent)                   \
	result name parameters                                                 \
	{                                                                      \
		if (!table.name) {                                             \
			errno = EOPNOTSUPP;                                    \
			return absent;                                         \
		}                                                              \
		return table.name arguments;                                   \
	}
#define FORWARD_VOID(name, parameters, arguments)                              \
	void name parameters                                                   \
	{                                                                      \
		if (table.name)                                                \
			table.name arguments;                                  \
	}
FUNCTIONS(FORWARD, FORWARD_VOID)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *library;

/* POSIX lets a data pointer hold a function's address; ISO C requires a copy through memory. */
static void find(const char *name, void *pointer)
{
	void *symbol = dlsym(library, name);

	memcpy(pointer, &symbol, sizeof(symbol));
}

static int open_library(const char *path, char *why, size_t size)
{
	library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		const char *text = dlerror();

		snprintf(why, size, "%s", text ? text : "dlopen failed");
		return -1;
	}
	if (!dlsym(library, "ibv_get_device_list")) {
		snprintf(why, size,
			 "%.400s is not libibverbs: it has no "
			 "ibv_get_device_list", path);
		dlclose(library);
		library = NULL;
		return -1;
	}
#define FIND(result, name, parameters, arguments, absent)                      \
	find(#name, &table.name);
#define FIND_VOID(name, parameters, arguments) find(#name, &table.name);
	FUNCTIONS(FIND, FIND_VOID)
	return 0;
}

int rp_load(const char *path, char *why, size_t size)
{
	int failed = 0;

	if (!path) {
		snprintf(why, size, "no library was named");
		return -1;
	}
	pthread_mutex_lock(&lock);
	if (!library)
		failed = open_library(path, why, size);
	pthread_mutex_unlock(&lock);
	return failed;
}

int rp_has_symbol(const char *name)
{
	return library && name && dlsym(library, name) != NULL;
}
